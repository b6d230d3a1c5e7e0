"""Tiny random transformers models of each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LLAMA_LIKE = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _build_llama(**keys: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**_LLAMA_LIKE, **keys}))


def _build_qwen3(**keys: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**{**_LLAMA_LIKE, "head_dim": 10, **keys}))


def _build_mixtral(**keys: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    # transformers needs rows of a multiple of 16 bytes here.
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 52}
    return MixtralForCausalLM(MixtralConfig(**{**_LLAMA_LIKE, **experts, **keys}))


def _build_gpt2(**keys: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 67, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **keys}))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _build_llama,
    "llama, tied": lambda: _build_llama(tie_word_embeddings=True, head_dim=8, rms_norm_eps=1e-5),
    "llama, scaled rope": lambda: _build_llama(rope_parameters=_LLAMA3_ROPE),
    "llama, biases": lambda: _build_llama(attention_bias=True, mlp_bias=True),
    "qwen3": _build_qwen3,
    "qwen3, tied": lambda: _build_qwen3(tie_word_embeddings=True, num_key_value_heads=4),
    "mixtral": _build_mixtral,
    "gpt2": _build_gpt2,
    "gpt2, narrow": lambda: _build_gpt2(n_inner=30, layer_norm_epsilon=1e-3),
    "gpt2, untied": lambda: _build_gpt2(tie_word_embeddings=False),
}


def build_random_model(name: str) -> Any:
    """Build one of MODELS with all parameters random, norms and biases too, so that none can be lost unnoticed."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key or ".ln_" in key else 0.0, 0.2)
    return model.eval()


def compute_hf_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, t, vocab] that transformers computes for int64 tokens [b, t]."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    return logits
