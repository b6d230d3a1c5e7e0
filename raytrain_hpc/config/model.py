"""Settings of the model, documented where they are declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain_hpc.config.field import AUTO, key


@dataclass
class ModelConfig:
    """The decoder. GPT-2 and Llama are two settings of one model."""

    preset: str = key("", "A known shape (gpt2_124m, llama3_8b, ...); keys given beside it win over it.")
    hidden_size: int = key(128, "Width of the residual stream.", minimum=1)
    num_layers: int = key(4, "Transformer blocks.", minimum=1)
    num_heads: int = key(4, "Attention heads; must divide hidden_size where head_dim is auto.", minimum=1)
    head_dim: int | str = key(AUTO, "Channels a head; auto: hidden_size / num_heads.", minimum=1)
    qk_norm: bool = key(False, "Normalise each head's queries and keys.")
    num_kv_heads: int | str = key(AUTO, "Key-value heads (grouped-query attention); auto: num_heads.", minimum=1)
    ffn_size: int | str = key(
        AUTO, "Feed-forward width; auto: 4 x hidden_size, or 8/3 of it up to a multiple of 64 for swiglu.", minimum=1
    )
    vocab_size: int | str = key(AUTO, "Vocabulary; auto: the dataset's tokenizer.", minimum=2)
    norm: Literal["layernorm", "rmsnorm"] = key("rmsnorm", "Normalisation before attention, feed-forward and head.")
    norm_eps: float = key(1e-5, "Epsilon inside the norms.", above=0)
    activation: Literal["gelu", "swiglu"] = key("swiglu", "Feed-forward: tanh-GELU of one product, or gated SiLU.")
    positions: Literal["learned", "rotary"] = key("rotary", "Learned absolute positions, or rotary embedding.")
    max_positions: int | str = key(AUTO, "Rows of the learned positions; auto: train.seq_len.", minimum=1)
    rope_theta: float = key(10000.0, "Base of the rotary frequencies.", above=0)
    rope_factor: float = key(1.0, "Llama 3's stretch of the long rotary wavelengths; 1: none.", minimum=1)
    rope_low_factor: float = key(1.0, "With rope_factor: waves above rope_original / this are long.", above=0)
    rope_high_factor: float = key(4.0, "With rope_factor: waves below rope_original / this stay as they are.", above=0)
    rope_original: int = key(8192, "With rope_factor: positions of the model before it was stretched.", minimum=1)
    tie_embeddings: bool = key(True, "Input embedding and output head share one weight.")
    bias: bool = key(False, "Biases in the linear layers and layer norms.")
    dropout: float = key(0.0, "Dropout on the embedding and on both residual branches.", minimum=0)
    init_std: float = key(0.02, "Standard deviation of the initial weights.", above=0)
    num_experts: int = key(
        0, "Feed-forwards a layer that positions choose among; 0: one that all go through.", minimum=0
    )
    experts_per_token: int = key(2, "Experts that a position goes to, with num_experts.", minimum=1)
    shared_expert_size: int = key(0, "Width of one more expert that every position goes to; 0: none.", minimum=0)
    balance: Literal["loss", "bias", "none"] = key(
        "loss", "How experts are kept busy: a loss over each sequence, a bias on the choice, or not at all."
    )
    balance_weight: float = key(0.01, "Weight of the balancing loss.", minimum=0)
    balance_rate: float = key(0.001, "How much the bias of an expert changes a step.", minimum=0)
