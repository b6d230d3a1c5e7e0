"""Conversion between config.json and ModelSpec for Llama, Qwen3, Mixtral and GPT-2. Plain data without torch.

A setting of config.json that the decoder does not support is an error with its name; none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.errors import ModelError

Family = Literal["llama", "qwen3", "mixtral", "gpt2"]
_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_DEFAULT_POSITIONS = {"llama": 2048, "qwen3": 32768, "mixtral": 131072}  # of a config.json without the number
_BALANCE_RATE = 0.001  # a default; imported models have no expert bias


def parse_hf_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the model that a config.json describes.

    Raises ModelError with the name of a missing key or of a setting that the decoder does not support.
    """
    readers: dict[Any, Callable[[Mapping[str, Any]], ModelSpec]] = {
        "llama": _parse_llama,
        "qwen3": _parse_qwen3,
        "mixtral": _parse_mixtral,
        "gpt2": _parse_gpt2,
    }
    kind = config.get("model_type")
    if kind not in readers:
        raise ModelError(f"config.json: model_type={kind!r}: known are {', '.join(readers)}")
    try:
        return readers[kind](config)
    except KeyError as error:
        raise ModelError(f"config.json: {error.args[0]} is missing") from error


def get_max_positions(config: Mapping[str, Any]) -> int:
    """Return the maximum number of positions of a model that `parse_hf_config` accepts."""
    default = _DEFAULT_POSITIONS.get(config["model_type"], 0)  # GPT-2's is never missing
    return int(config.get("n_positions") or config.get("max_position_embeddings") or default)


def get_family(spec: ModelSpec) -> Family:
    """Return the Hugging Face model family that can represent this spec. Raises ModelError if there is none."""
    if spec.position_embedding == "learned":
        _require_spec_values(spec, norm="layernorm", bias=True, qk_norm=False, num_experts=0)
        if spec.activation == "swiglu":
            _require_spec_values(spec, activation="gelu")
        if (spec.num_kv_heads, spec.attention_size) != (spec.num_heads, spec.hidden_size):
            raise ModelError("export: GPT-2 needs num_kv_heads equal to num_heads, and hidden_size channels in them")
        return "gpt2"
    _require_spec_values(spec, norm="rmsnorm", activation="swiglu")
    if spec.num_experts:
        _require_spec_values(spec, bias=False, qk_norm=False, shared_expert_size=0, rope_factor=1.0)
        if spec.load_balancing == "bias" or spec.experts_per_token < 2:
            raise ModelError(
                f"export: Mixtral needs at least 2 experts per token and has no routing bias; got "
                f"model.load_balancing={spec.load_balancing}, model.experts_per_token={spec.experts_per_token}"
            )
        return "mixtral"
    if spec.qk_norm:
        _require_spec_values(spec, bias=False)
        return "qwen3"
    return "llama"


def build_hf_config(
    spec: ModelSpec, positions: int, dtype: str, special_token_ids: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config.json of a model with `positions` positions and weights stored as `dtype` ("float32").

    Keys of `special_token_ids` are bos_token_id, eos_token_id and pad_token_id. Raises ModelError as `get_family`.
    """
    family = get_family(spec)
    common = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": spec.vocab_size,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": special_token_ids.get("bos_token_id"),
        "eos_token_id": special_token_ids.get("eos_token_id"),
        "pad_token_id": special_token_ids.get("pad_token_id"),
        "use_cache": True,
    }
    if family == "gpt2":
        return common | {
            "n_embd": spec.hidden_size,
            "n_layer": spec.num_layers,
            "n_head": spec.num_heads,
            "n_inner": spec.ffn_size,
            "n_positions": spec.max_positions,
            "layer_norm_epsilon": spec.norm_eps,
            "activation_function": "gelu_new" if spec.activation == "gelu" else "gelu",
            "resid_pdrop": spec.dropout,
            "embd_pdrop": spec.dropout,
            "attn_pdrop": 0.0,
        }
    return common | _build_rotary_config(spec, family, positions)


def _build_rotary_config(spec: ModelSpec, family: Family, positions: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_size,
        "max_position_embeddings": positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }
    if family == "mixtral":
        experts = {"num_local_experts": spec.num_experts, "num_experts_per_tok": spec.experts_per_token}
        balance = spec.load_balancing_weight if spec.load_balancing == "loss" else 0.0
        return config | experts | {"router_aux_loss_coef": balance, "sliding_window": None}
    config["rope_scaling"] = None
    if spec.rope_factor > 1:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": spec.rope_factor,
            "low_freq_factor": spec.rope_low_freq_factor,
            "high_freq_factor": spec.rope_high_freq_factor,
            "original_max_position_embeddings": spec.rope_original_max_positions,
        }
    config["attention_bias"] = spec.bias
    return config | ({"mlp_bias": spec.bias} if family == "llama" else {"use_sliding_window": False})


def _parse_llama(config: Mapping[str, Any]) -> ModelSpec:
    biases = {bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))}
    if len(biases) == 2:
        raise _make_value_error(
            "attention_bias", config.get("attention_bias"), "biases must be in all linear layers or in none"
        )
    return _parse_rotary_decoder(config, bias=biases.pop())


def _parse_qwen3(config: Mapping[str, Any]) -> ModelSpec:
    _require_config_value(config, "attention_bias", False, "biases must be in all linear layers or in none")
    _require_config_value(config, "use_sliding_window", False, "only full attention is supported")
    return _parse_rotary_decoder(config, qk_norm=True, head_dim=config.get("head_dim", 128))


def _parse_mixtral(config: Mapping[str, Any]) -> ModelSpec:
    _require_config_value(config, "sliding_window", None, "only full attention is supported")
    weight = float(config.get("router_aux_loss_coef", 0.001))
    return _parse_rotary_decoder(
        config,
        num_experts=int(config["num_local_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        load_balancing="loss" if weight else "none",
        load_balancing_weight=weight,
        expert_bias_rate=_BALANCE_RATE,
    )


def _parse_rotary_decoder(config: Mapping[str, Any], **overrides: Any) -> ModelSpec:
    _require_config_value(config, "hidden_act", "silu", "only SiLU-gated feed-forward is supported")
    heads = int(config["num_attention_heads"])
    settings = {
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "ffn_size": int(config["intermediate_size"]),
        "max_positions": 0,
        "norm": "rmsnorm",
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "activation": "swiglu",
        "position_embedding": "rotary",
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bias": False,
        "dropout": 0.0,
        "init_std": float(config.get("initializer_range", 0.02)),
        "head_dim": int(config.get("head_dim") or 0),
    }
    return ModelSpec(**{**settings, **_parse_rope(config), **overrides})


def _parse_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings: from rope_parameters in newer files, from rope_theta and rope_scaling in older."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = {"rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta
    if kind != "llama3":
        raise _make_value_error("rope_scaling", kind, "only llama3 scaling is supported")
    return theta | {
        "rope_factor": float(rope["factor"]),
        "rope_low_freq_factor": float(rope["low_freq_factor"]),
        "rope_high_freq_factor": float(rope["high_freq_factor"]),
        "rope_original_max_positions": int(rope["original_max_position_embeddings"]),
    }


def _parse_gpt2(config: Mapping[str, Any]) -> ModelSpec:
    activation = config.get("activation_function", "gelu_new")
    if activation not in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        raise _make_value_error("activation_function", activation, "only GELU is supported")
    _require_config_value(config, "scale_attn_weights", True, "scores are always divided by sqrt(head_dim)")
    _require_config_value(config, "scale_attn_by_inverse_layer_idx", False, "all layers use the same scale")
    _require_config_value(config, "add_cross_attention", False, "only decoders are supported")
    width, heads = int(config["n_embd"]), int(config["n_head"])
    return ModelSpec(
        vocab_size=int(config["vocab_size"]),
        hidden_size=width,
        num_layers=int(config["n_layer"]),
        num_heads=heads,
        num_kv_heads=heads,
        ffn_size=int(config.get("n_inner") or 4 * width),
        max_positions=int(config["n_positions"]),
        norm="layernorm",
        norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        activation="gelu_erf" if activation == "gelu" else "gelu",
        position_embedding="learned",
        rope_theta=10000.0,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        bias=True,
        dropout=0.0,
        init_std=float(config.get("initializer_range", 0.02)),
    )


def _require_config_value(config: Mapping[str, Any], key: str, expected: Any, reason: str) -> None:
    value = config.get(key, expected)
    if value != expected:
        raise _make_value_error(key, value, reason)


def _make_value_error(key: str, value: Any, reason: str) -> ModelError:
    return ModelError(f"config.json: {key}={value!r}: not supported; {reason}")


def _require_spec_values(spec: ModelSpec, **expected: Any) -> None:
    for name, value in expected.items():
        if getattr(spec, name) != value:
            raise ModelError(
                f"export: no supported model family has model.{name}={getattr(spec, name)} with "
                f"model.position_embedding={spec.position_embedding}; it would need {value}"
            )
