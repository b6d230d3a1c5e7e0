"""Resolved model architecture, read by the planner and the model. Plain data without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from raytrain_hpc.config.schema import AUTO, ModelConfig
from raytrain_hpc.errors import ConfigError

VOCAB_SIZE_MULTIPLE = 64  # the head is padded to whole matrix-multiplication tiles

_FFN_MULTIPLE = 64
_BALANCE_KEYS = ("load_balancing", "load_balancing_weight", "expert_bias_rate")
_FORMER_FIELDS = {
    "positions": "position_embedding",
    "balance": "load_balancing",
    "balance_weight": "load_balancing_weight",
    "balance_rate": "expert_bias_rate",
    "rope_low_factor": "rope_low_freq_factor",
    "rope_high_factor": "rope_high_freq_factor",
    "rope_original": "rope_original_max_positions",
}


@dataclass(frozen=True)
class ModelSpec:
    """ModelConfig with every `auto` resolved. Stored as JSON by `dataclasses.asdict`, read by `from_json`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    max_positions: int  # rows of the learned position embedding; 0 with rotary positions
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    activation: Literal["gelu", "gelu_erf", "swiglu"]
    position_embedding: Literal["learned", "rotary"]
    rope_theta: float
    tie_embeddings: bool
    bias: bool
    dropout: float
    init_std: float
    num_experts: int = 0  # 0: dense feed-forward
    experts_per_token: int = 0
    shared_expert_size: int = 0  # width of the expert that every token passes through; 0: none
    load_balancing: Literal["loss", "bias", "none"] = "none"
    load_balancing_weight: float = 0.0  # weight of the load-balancing loss
    expert_bias_rate: float = 0.0  # change of the expert bias per step
    head_dim: int = 0  # channels per head; 0 becomes hidden_size / num_heads
    qk_norm: bool = False  # normalize queries and keys per head
    rope_factor: float = 1.0  # scaling of long rotary wavelengths (Llama 3); 1: none
    rope_low_freq_factor: float = (
        1.0  # wavelengths above rope_original_max_positions / rope_low_freq_factor are scaled in full
    )
    rope_high_freq_factor: float = (
        4.0  # wavelengths below rope_original_max_positions / rope_high_freq_factor are not scaled
    )
    rope_original_max_positions: int = 8192  # context length before scaling

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> ModelSpec:
        """Build a spec from the JSON of a checkpoint. Former field names of older checkpoints are translated."""
        return cls(**{_FORMER_FIELDS.get(name, name): value for name, value in stored.items()})

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)

    @property
    def attention_size(self) -> int:
        """Channels of the queries of all heads, and of the attention output."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of the keys, or of the values, of all key-value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def gelu_approximation(self) -> str:
        """The approximation of GELU as torch calls it: tanh or none."""
        return "none" if self.activation == "gelu_erf" else "tanh"

    @property
    def num_norm_parameters(self) -> int:
        """Parameters of one norm over hidden_size channels."""
        return self.hidden_size * (2 if self.norm == "layernorm" and self.bias else 1)

    @property
    def num_qk_norm_parameters(self) -> int:
        """Parameters of the query norm and the key norm of one block."""
        return 2 * self.head_dim * self.num_norm_parameters // self.hidden_size if self.qk_norm else 0

    @property
    def num_ffn_matrices(self) -> int:
        """Weight matrices of one feed-forward: 3 if gated (swiglu), else 2."""
        return 3 if self.activation == "swiglu" else 2

    @property
    def active_ffn_size(self) -> int:
        """Feed-forward channels that a token passes through, summed over its experts."""
        if not self.num_experts:
            return self.ffn_size
        return self.experts_per_token * self.ffn_size + self.shared_expert_size

    def count_active_matmul_parameters(self) -> int:
        """Count the weights of one block that are multiplied per token; biases and norms excluded.

        These are queries, keys, values, output projection and feed-forward. In a mixture of experts, the feed-forward
        is the router, the shared expert and the token's own experts.
        """
        attention = 2 * self.hidden_size * (self.attention_size + self.kv_size)
        return attention + self.hidden_size * (self.num_ffn_matrices * self.active_ffn_size + self.num_experts)

    def count_expert_parameters(self) -> int:
        """Count the parameters of all routed experts of one block; 0 for a dense feed-forward."""
        return self.num_experts * self.num_ffn_matrices * self.hidden_size * self.ffn_size

    def count_layer_parameters(self) -> int:
        """Count all parameters of one block."""
        biases, dense = 0, self.shared_expert_size if self.num_experts else self.ffn_size
        if self.bias:
            biases = self.attention_size + 2 * self.kv_size + self.hidden_size
            if dense:
                biases += self.hidden_size + (self.num_ffn_matrices - 1) * dense
        attention = 2 * self.hidden_size * (self.attention_size + self.kv_size)
        feed_forward = self.hidden_size * (self.num_ffn_matrices * dense + self.num_experts)
        norms = 2 * self.num_norm_parameters + self.num_qk_norm_parameters
        return attention + feed_forward + self.count_expert_parameters() + biases + norms

    def count_parameters(self) -> int:
        """Count all parameters of the model. A tied head is counted once."""
        tables = self.vocab_size * (1 if self.tie_embeddings else 2) + self.max_positions
        return tables * self.hidden_size + self.num_layers * self.count_layer_parameters() + self.num_norm_parameters


def resolve_model_spec(model: ModelConfig, *, vocab_size: int | None, seq_len: int) -> ModelSpec:
    """Resolve every `auto` of the model config. `vocab_size` is that of the dataset, or None without a dataset.

    Raises ConfigError if neither the config nor a dataset gives the vocabulary size, or if it is below the dataset's.
    """
    if model.vocab_size == AUTO and vocab_size is None:
        raise ConfigError("model.vocab_size", AUTO, "", "needs a number, as there is no dataset to take it from")
    vocabulary = int(vocab_size or 0) if model.vocab_size == AUTO else int(model.vocab_size)
    if vocab_size is not None and vocabulary < vocab_size:
        remedy = f"the dataset has {vocab_size} tokens; use at least that, or auto"
        raise ConfigError("model.vocab_size", model.vocab_size, "", remedy)
    return ModelSpec(
        vocab_size=vocabulary,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_heads if model.num_kv_heads == AUTO else int(model.num_kv_heads),
        ffn_size=_resolve_ffn_size(model),
        max_positions=_resolve_max_positions(model, seq_len),
        norm=model.norm,
        norm_eps=model.norm_eps,
        activation=model.activation,
        position_embedding=model.position_embedding,
        rope_theta=model.rope_theta,
        tie_embeddings=model.tie_embeddings,
        bias=model.bias,
        dropout=model.dropout,
        init_std=model.init_std,
        head_dim=0 if model.head_dim == AUTO else int(model.head_dim),
        qk_norm=model.qk_norm,
        rope_factor=model.rope_factor,
        rope_low_freq_factor=model.rope_low_freq_factor,
        rope_high_freq_factor=model.rope_high_freq_factor,
        rope_original_max_positions=model.rope_original_max_positions,
        **_resolve_experts(model),
    )


def resolve_model_config(model: ModelConfig, spec: ModelSpec) -> ModelConfig:
    """Return the settings of a model with every `auto` replaced by what it was resolved to."""
    names = [field.name for field in fields(model) if getattr(model, field.name) == AUTO]
    return replace(model, **{name: getattr(spec, name) for name in names})


def spec_to_settings(spec: ModelSpec) -> dict[str, Any]:
    """Return the `model.*` settings that resolve to this spec, independent of the dataset and train.seq_len."""
    settings = asdict(spec)
    excluded = [] if spec.position_embedding == "learned" else ["max_positions"]
    if not spec.num_experts:
        excluded += ["num_experts", "experts_per_token", "shared_expert_size", *_BALANCE_KEYS]
    return {key: value for key, value in settings.items() if key not in excluded}


def _resolve_max_positions(model: ModelConfig, seq_len: int) -> int:
    if model.position_embedding != "learned":
        return 0
    if model.max_positions == AUTO:
        return seq_len
    if int(model.max_positions) < seq_len:
        remedy = f"train.seq_len={seq_len} needs as many learned positions; increase it, or shorten seq_len"
        raise ConfigError("model.max_positions", model.max_positions, "", remedy)
    return int(model.max_positions)


def _resolve_experts(model: ModelConfig) -> dict[str, Any]:
    if not model.num_experts:
        return {}
    return {
        "num_experts": model.num_experts,
        "experts_per_token": model.experts_per_token,
        "shared_expert_size": model.shared_expert_size,
        "load_balancing": model.load_balancing,
        "load_balancing_weight": model.load_balancing_weight,
        "expert_bias_rate": model.expert_bias_rate,
    }


def _resolve_ffn_size(model: ModelConfig) -> int:
    if model.ffn_size != AUTO:
        return int(model.ffn_size)
    if model.activation != "swiglu":
        return 4 * model.hidden_size
    # Three matrices of width 8/3 h have as many weights as two of width 4 h (Shazeer 2020, arXiv 2002.05202).
    blocks = -(-8 * model.hidden_size // (3 * _FFN_MULTIPLE))
    return blocks * _FFN_MULTIPLE
