"""Resolving a model config to a ModelSpec, and its parameter counts against the module."""

import dataclasses
import json

import pytest
import torch

from raytrain_hpc.config.model_spec import ModelSpec, resolve_model_spec
from raytrain_hpc.config.presets import PRESETS
from raytrain_hpc.config.schema import ModelConfig
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.model.decoder import Decoder


def count_module_parameters(spec: ModelSpec) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(spec).parameters())


# Hugging Face's counts of openai-community/gpt2, meta-llama/Llama-3.2-1B and meta-llama/Meta-Llama-3-8B.
@pytest.mark.parametrize(
    "preset, published", [("gpt2_124m", 124_439_808), ("llama3_1b", 1_235_814_400), ("llama3_8b", 8_030_261_248)]
)
def test_presets_have_the_published_parameter_counts(preset: str, published: int):
    spec = resolve_model_spec(ModelConfig(**PRESETS[preset]), vocab_size=None, seq_len=1024)
    assert spec.count_parameters() == published == count_module_parameters(spec)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "keys",
    [
        {"bias": True},
        {"bias": False},
        {"tie_embeddings": False, "num_kv_heads": 1},
        {"activation": "swiglu", "bias": True, "norm": "layernorm"},
        {"activation": "gelu", "norm": "rmsnorm", "position_embedding": "learned", "ffn_size": 40},
        {"head_dim": 12, "qk_norm": True, "num_kv_heads": 2},
        {"head_dim": 6, "qk_norm": True, "bias": True},
        {"num_experts": 6, "experts_per_token": 2, "bias": True},
        {"num_experts": 6, "experts_per_token": 3, "shared_expert_size": 9, "bias": True, "activation": "gelu"},
    ],
)
def test_parameter_counts_match_the_module(tiny, family: str, keys: dict):
    spec = tiny(family, **keys)
    assert spec.count_parameters() == count_module_parameters(spec)
    with torch.device("meta"):
        block = Decoder(spec).layers["0"]
    assert spec.count_layer_parameters() == sum(parameter.numel() for parameter in block.parameters())
    matrices = sum(parameter.numel() for parameter in block.parameters() if parameter.dim() == 2)
    stacked = sum(parameter.numel() for parameter in block.parameters() if parameter.dim() == 3)
    assert spec.count_expert_parameters() == stacked
    if stacked:
        matrices += stacked // spec.num_experts * spec.experts_per_token
    assert spec.count_active_matmul_parameters() == matrices


def test_auto_settings_are_resolved():
    spec = resolve_model_spec(ModelConfig(hidden_size=192, num_heads=6), vocab_size=65, seq_len=128)
    assert (spec.vocab_size, spec.num_kv_heads, spec.ffn_size, spec.max_positions) == (65, 6, 512, 0)
    assert resolve_model_spec(ModelConfig(hidden_size=128), vocab_size=65, seq_len=1).ffn_size == 384
    gpt2 = ModelConfig(hidden_size=100, num_heads=4, activation="gelu", position_embedding="learned")
    assert resolve_model_spec(gpt2, vocab_size=65, seq_len=77).ffn_size == 400
    assert resolve_model_spec(gpt2, vocab_size=65, seq_len=77).max_positions == 77


def test_spec_survives_json(tiny):
    spec = tiny("llama")
    assert ModelSpec.from_json(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec


def test_vocabulary_smaller_than_the_dataset_is_refused():
    with pytest.raises(ConfigError, match="the dataset has 300 tokens"):
        resolve_model_spec(ModelConfig(vocab_size=256), vocab_size=300, seq_len=8)
    assert resolve_model_spec(ModelConfig(vocab_size=320), vocab_size=300, seq_len=8).vocab_size == 320


def test_unknown_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="model.vocab_size='auto'"):
        resolve_model_spec(ModelConfig(), vocab_size=None, seq_len=8)
