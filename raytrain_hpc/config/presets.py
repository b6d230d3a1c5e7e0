"""Settings of known models for `model.preset=NAME`, applied before the user's own keys."""

from __future__ import annotations

_GPT2 = {
    "norm": "layernorm",
    "activation": "gelu",
    "position_embedding": "learned",
    "bias": True,
    "tie_embeddings": True,
    "vocab_size": 50257,
}
_QWEN3 = {
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "activation": "swiglu",
    "position_embedding": "rotary",
    "bias": False,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151936,
    "head_dim": 128,
    "qk_norm": True,
}
_LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position_embedding": "rotary",
    "bias": False,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "num_kv_heads": 8,
}

# Published architectures: GPT-2 (Radford et al. 2019), Llama 3 (arXiv 2407.21783) and its 3.2 1B model card, Qwen3
# (arXiv 2505.09388).
PRESETS: dict[str, dict[str, object]] = {
    "gpt2_124m": {**_GPT2, "hidden_size": 768, "num_layers": 12, "num_heads": 12},
    "gpt2_350m": {**_GPT2, "hidden_size": 1024, "num_layers": 24, "num_heads": 16},
    "gpt2_1.5b": {**_GPT2, "hidden_size": 1600, "num_layers": 48, "num_heads": 25},
    "llama3_1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "num_layers": 16,
        "num_heads": 32,
        "ffn_size": 8192,
        "tie_embeddings": True,
    },
    "llama3_8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "ffn_size": 14336,
        "tie_embeddings": False,
    },
    "llama3_70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "num_layers": 80,
        "num_heads": 64,
        "ffn_size": 28672,
        "tie_embeddings": False,
    },
    "qwen3_0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "ffn_size": 3072,
        "tie_embeddings": True,
    },
    "qwen3_30b_a3b": {
        **_QWEN3,
        "hidden_size": 2048,
        "num_layers": 48,
        "num_heads": 32,
        "num_kv_heads": 4,
        "ffn_size": 768,
        "tie_embeddings": False,
        "num_experts": 128,
        "experts_per_token": 8,
        "load_balancing_weight": 0.001,
    },
}


def _make_training_defaults(seq_len: int, lr: float) -> dict[str, object]:
    return {"train.seq_len": seq_len, "train.dtype": "bf16", "optimizer.lr": lr}


# Settings of training that a preset brings along. Peak learning rates: of models of that size in GPT-3 (arXiv
# 2005.14165, table 2.1; 6e-4 for 124M) and Llama 3. Qwen3's are not published; those of Llama 3 are taken.
PRESET_TRAINING: dict[str, dict[str, object]] = {
    "gpt2_124m": _make_training_defaults(1024, 6e-4),
    "gpt2_350m": _make_training_defaults(1024, 3e-4),
    "gpt2_1.5b": _make_training_defaults(1024, 2e-4),
    "llama3_1b": _make_training_defaults(8192, 3e-4),
    "llama3_8b": _make_training_defaults(8192, 3e-4),
    "llama3_70b": _make_training_defaults(8192, 1.5e-4),
    "qwen3_0.6b": _make_training_defaults(4096, 3e-4),
    "qwen3_30b_a3b": _make_training_defaults(4096, 3e-4),
}
