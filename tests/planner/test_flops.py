"""Model FLOPs against torch's FLOP counter and a published formula."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.presets import PRESETS
from raytrain_hpc.config.schema import ModelConfig
from raytrain_hpc.model.decoder import Decoder, loss_sum
from raytrain_hpc.planner.flops import compute_flops_per_token


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_kv_heads": 2, "tie_embeddings": False, "ffn_size": 200},
        {"activation": "gelu", "norm": "layernorm", "position_embedding": "learned", "bias": True},
    ],
)
def test_torch_counts_the_same_operations(keys: dict):
    """On the meta device the counter sees every product. It counts attention over the full square of scores."""
    spec = resolve_model_spec(ModelConfig(**keys), vocab_size=97, seq_len=48)
    with torch.device("meta"):
        decoder, tokens = Decoder(spec), torch.zeros(3, 48, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss_sum(decoder(tokens), tokens).backward()
    assert counter.get_total_flops() == compute_flops_per_token(spec, 48, causal=False) * tokens.numel()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_expected_parameters_and_flops(preset: str):
    """On the meta device, at full size."""
    spec = resolve_model_spec(ModelConfig(**PRESETS[preset]), vocab_size=None, seq_len=32)
    with torch.device("meta"):
        decoder, tokens = Decoder(spec), torch.zeros(1, 32, dtype=torch.int64)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == spec.count_parameters()
    if spec.num_experts:
        return  # which experts work depends on values, which the meta device lacks
    with FlopCounterMode(display=False) as counter:
        loss_sum(decoder(tokens), tokens).backward()
    assert counter.get_total_flops() == compute_flops_per_token(spec, 32, causal=False) * tokens.numel()


def test_causal_attention_counts_half_of_the_scores():
    spec = resolve_model_spec(ModelConfig(hidden_size=192, num_heads=6), vocab_size=97, seq_len=48)
    full, half = (compute_flops_per_token(spec, 4096, causal=causal) for causal in (False, True))
    linear = compute_flops_per_token(spec, 0)
    assert full - linear == 2 * (half - linear) == 12 * 4 * 192 * 4096


def test_flops_match_the_formula_of_narayanan_et_al():
    """72 B s L h^2 (1 + s/6h + V/12Lh), arXiv 2104.04473: full attention, feed-forward 4h, no recomputation."""
    spec = resolve_model_spec(ModelConfig(**PRESETS["gpt2_1.5b"]), vocab_size=None, seq_len=1024)
    s, h, layers, vocab_size = 1024, spec.hidden_size, spec.num_layers, spec.vocab_size
    published = 72 * layers * h**2 * (1 + s / (6 * h) + vocab_size / (12 * layers * h))
    assert compute_flops_per_token(spec, s, causal=False) == pytest.approx(published, rel=1e-12)
