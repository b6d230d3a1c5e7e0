"""Settings of known models for `model.preset=NAME`, applied before the user's own model keys."""

from __future__ import annotations

_GPT2 = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "bias": True,
    "tie_embeddings": True,
    "vocab_size": 50257,
}
_LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": False,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "num_kv_heads": 8,
}

# Published architectures: GPT-2 (Radford et al. 2019), Llama 3 (arXiv 2407.21783) and its 3.2 1B model card.
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
}
