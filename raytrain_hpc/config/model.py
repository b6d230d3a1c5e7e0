"""Settings of the model: section `model` of the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain_hpc.config.field import AUTO, Auto, Section, key


@dataclass
class ModelConfig(Section):
    """The decoder. GPT-2 and Llama are two configurations of the same model."""

    preset: str = key("", "Known architecture (gpt2_124m, llama3_8b, ...); other model keys override it.")
    hf: str = key(
        "",
        "Directory of any transformers causal language model (config.json, and weights if there are some), trained by "
        "its own code instead of the built-in decoder; then the other model keys are not used.",
    )
    hidden_size: int = key(128, "Width of the residual stream.", minimum=1)
    num_layers: int = key(4, "Number of transformer blocks.", minimum=1)
    num_heads: int = key(4, "Attention heads; must divide hidden_size if head_dim is auto.", minimum=1)
    head_dim: int | Auto = key(AUTO, "Channels per head; auto: hidden_size / num_heads.", minimum=1)
    qk_norm: bool = key(False, "Normalize queries and keys per head (Qwen3).")
    num_kv_heads: int | Auto = key(AUTO, "Key-value heads (grouped-query attention); auto: num_heads.", minimum=1)
    ffn_size: int | Auto = key(
        AUTO, "Feed-forward width; auto: 4 x hidden_size, or for swiglu 8/3 of it, rounded up to 64.", minimum=1
    )
    vocab_size: int | Auto = key(AUTO, "Vocabulary size; auto: that of the dataset's tokenizer.", minimum=2)
    norm: Literal["layernorm", "rmsnorm"] = key("rmsnorm", "Norm before attention, feed-forward and output head.")
    norm_eps: float = key(1e-5, "Epsilon of the norms.", above=0)
    activation: Literal["gelu", "gelu_erf", "swiglu"] = key(
        "swiglu", "Feed-forward. gelu: tanh-GELU (GPT-2); gelu_erf: exact GELU (nanoGPT); swiglu: gated SiLU."
    )
    position_embedding: Literal["learned", "rotary"] = key(
        "rotary", "learned: absolute position embedding; rotary: RoPE."
    )
    max_positions: int | Auto = key(AUTO, "Rows of the learned position embedding; auto: train.seq_len.", minimum=1)
    rope_theta: float = key(10000.0, "Base of the rotary frequencies.", above=0)
    rope_factor: float = key(1.0, "Llama 3's scaling of long rotary wavelengths; 1: none.", minimum=1)
    rope_low_freq_factor: float = key(
        1.0,
        "With rope_factor: wavelengths above rope_original_max_positions / rope_low_freq_factor are scaled in full.",
        above=0,
    )
    rope_high_freq_factor: float = key(
        4.0,
        "With rope_factor: wavelengths below rope_original_max_positions / rope_high_freq_factor are not scaled.",
        above=0,
    )
    rope_original_max_positions: int = key(8192, "With rope_factor: context length before scaling.", minimum=1)
    tie_embeddings: bool = key(True, "Share one weight between input embedding and output head.")
    bias: bool = key(False, "Biases in linear layers and layer norms.")
    dropout: float = key(0.0, "Dropout probability on the embedding and on both residual branches.", minimum=0)
    init_std: float = key(0.02, "Standard deviation of the initial weights.", above=0)
    num_experts: int = key(0, "Experts per mixture-of-experts layer; 0: dense feed-forward.", minimum=0)
    experts_per_token: int = key(2, "Experts per token (top-k), with num_experts.", minimum=1)
    shared_expert_size: int = key(0, "Width of a shared expert that every token passes through; 0: none.", minimum=0)
    load_balancing: Literal["loss", "bias", "none"] = key(
        "loss",
        "Load balancing of experts. loss: auxiliary loss per sequence; bias: bias on the routing scores; none: off.",
    )
    load_balancing_weight: float = key(0.01, "Weight of the load-balancing loss.", minimum=0)
    expert_bias_rate: float = key(
        0.001, "Change of an expert's routing bias per step, with load_balancing=bias.", minimum=0
    )
