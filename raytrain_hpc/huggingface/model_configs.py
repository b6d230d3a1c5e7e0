"""config.json of the families that a Decoder can be, both ways: Llama, Qwen3, Mixtral, GPT-2. Plain data, no torch.

What a config.json says and a Decoder cannot do is refused by name, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from raytrain_hpc.config.model_spec import ModelShape
from raytrain_hpc.errors import ModelError

Family = Literal["llama", "qwen3", "mixtral", "gpt2"]
_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_BALANCE_RATE = 0.001  # of a bias that no imported model has


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The Decoder that a config.json describes. ModelError naming what is missing, or what a Decoder cannot do."""
    readers: dict[Any, Callable[[Mapping[str, Any]], ModelShape]] = {
        "llama": _llama,
        "qwen3": _qwen3,
        "mixtral": _mixtral,
        "gpt2": _gpt2,
    }
    kind = config.get("model_type")
    if kind not in readers:
        raise ModelError(f"config.json: model_type={kind!r}: known are {', '.join(readers)}")
    try:
        return readers[kind](config)
    except KeyError as error:
        raise ModelError(f"config.json: {error.args[0]} is missing") from error


def positions_of(config: Mapping[str, Any]) -> int:
    """Positions that the model is made for."""
    return int(config.get("n_positions") or config.get("max_position_embeddings") or 0)


def family_of(shape: ModelShape) -> Family:
    """The family that a Decoder of this shape is a member of. ModelError saying what keeps it out of all."""
    if shape.positions == "learned":
        _must(shape, norm="layernorm", activation="gelu", bias=True, qk_norm=False, num_experts=0)
        if (shape.num_kv_heads, shape.attention_size) != (shape.num_heads, shape.hidden_size):
            raise ModelError("export: GPT-2 has as many key-value heads as heads, and hidden_size channels in them")
        return "gpt2"
    _must(shape, norm="rmsnorm", activation="swiglu")
    if shape.num_experts:
        _must(shape, bias=False, qk_norm=False, shared_expert_size=0, rope_factor=1.0)
        if shape.balance == "bias" or shape.experts_per_token < 2:
            raise ModelError(
                f"export: Mixtral chooses at least 2 experts, by their scores alone; model.balance={shape.balance} and "
                f"model.experts_per_token={shape.experts_per_token} cannot be said there"
            )
        return "mixtral"
    if shape.qk_norm:
        _must(shape, bias=False)
        return "qwen3"
    return "llama"


def config_of(shape: ModelShape, positions: int, dtype: str, ends: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a Decoder made for so many positions, its weights stored as `dtype` ("float32", "bfloat16").

    `ends`: ids of tokens, by their names there (eos_token_id, ...). ModelError as in `family_of`.
    """
    family = family_of(shape)
    common = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shape.vocab_size,
        "initializer_range": shape.init_std,
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": ends.get("bos_token_id"),
        "eos_token_id": ends.get("eos_token_id"),
        "pad_token_id": ends.get("pad_token_id"),
        "use_cache": True,
    }
    if family == "gpt2":
        return common | {
            "n_embd": shape.hidden_size,
            "n_layer": shape.num_layers,
            "n_head": shape.num_heads,
            "n_inner": shape.ffn_size,
            "n_positions": shape.max_positions,
            "layer_norm_epsilon": shape.norm_eps,
            "activation_function": "gelu_new",
            "resid_pdrop": shape.dropout,
            "embd_pdrop": shape.dropout,
            "attn_pdrop": 0.0,
        }
    return common | _rotary_config(shape, family, positions)


def _rotary_config(shape: ModelShape, family: Family, positions: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_size,
        "max_position_embeddings": positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }
    if family == "mixtral":
        experts = {"num_local_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token}
        balance = shape.balance_weight if shape.balance == "loss" else 0.0
        return config | experts | {"router_aux_loss_coef": balance, "sliding_window": None}
    config["rope_scaling"] = None
    if shape.rope_factor > 1:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": shape.rope_factor,
            "low_freq_factor": shape.rope_low_factor,
            "high_freq_factor": shape.rope_high_factor,
            "original_max_position_embeddings": shape.rope_original,
        }
    config["attention_bias"] = shape.bias
    return config | ({"mlp_bias": shape.bias} if family == "llama" else {"use_sliding_window": False})


def _llama(config: Mapping[str, Any]) -> ModelShape:
    biases = {bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))}
    if len(biases) == 2:
        raise _cannot("attention_bias", config.get("attention_bias"), "biases are in all products or in none")
    return _rotary(config, bias=biases.pop())


def _qwen3(config: Mapping[str, Any]) -> ModelShape:
    _is(config, "attention_bias", False, "biases are in all products or in none")
    _is(config, "use_sliding_window", False, "attention reaches the whole sequence")
    return _rotary(config, qk_norm=True, head_dim=config.get("head_dim", 128))


def _mixtral(config: Mapping[str, Any]) -> ModelShape:
    _is(config, "sliding_window", None, "attention reaches the whole sequence")
    weight = float(config.get("router_aux_loss_coef", 0.001))
    return _rotary(
        config,
        num_experts=int(config["num_local_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        balance="loss" if weight else "none",
        balance_weight=weight,
        balance_rate=_BALANCE_RATE,
    )


def _rotary(config: Mapping[str, Any], **more: Any) -> ModelShape:
    _is(config, "hidden_act", "silu", "feed-forwards are gated by SiLU")
    heads = int(config["num_attention_heads"])
    shape = {
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
        "positions": "rotary",
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bias": False,
        "dropout": 0.0,
        "init_std": float(config.get("initializer_range", 0.02)),
        "head_dim": int(config.get("head_dim") or 0),
    }
    return ModelShape(**{**shape, **_rope(config), **more})


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary frequencies: newer files say all of it in rope_parameters, older ones in rope_theta and rope_scaling."""
    said = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = {"rope_theta": float(said.get("rope_theta") or config.get("rope_theta") or 10000.0)}
    kind = said.get("rope_type") or said.get("type") or "default"
    if kind == "default":
        return theta
    if kind != "llama3":
        raise _cannot("rope_scaling", kind, "rotary positions are stretched as Llama 3's, or not at all")
    return theta | {
        "rope_factor": float(said["factor"]),
        "rope_low_factor": float(said["low_freq_factor"]),
        "rope_high_factor": float(said["high_freq_factor"]),
        "rope_original": int(said["original_max_position_embeddings"]),
    }


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise _cannot("activation_function", config["activation_function"], "GELU is in its tanh form")
    _is(config, "scale_attn_weights", True, "scores are divided by the root of head_dim")
    _is(config, "scale_attn_by_inverse_layer_idx", False, "all layers scale their scores alike")
    _is(config, "add_cross_attention", False, "there is no encoder")
    width, heads = int(config["n_embd"]), int(config["n_head"])
    return ModelShape(
        vocab_size=int(config["vocab_size"]),
        hidden_size=width,
        num_layers=int(config["n_layer"]),
        num_heads=heads,
        num_kv_heads=heads,
        ffn_size=int(config.get("n_inner") or 4 * width),
        max_positions=int(config["n_positions"]),
        norm="layernorm",
        norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        activation="gelu",
        positions="learned",
        rope_theta=10000.0,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        bias=True,
        dropout=0.0,
        init_std=float(config.get("initializer_range", 0.02)),
    )


def _is(config: Mapping[str, Any], key: str, wanted: Any, because: str) -> None:
    found = config.get(key, wanted)
    if found != wanted:
        raise _cannot(key, found, because)


def _cannot(key: str, value: Any, because: str) -> ModelError:
    return ModelError(f"config.json: {key}={value!r}: not what a decoder here can be: {because}")


def _must(shape: ModelShape, **wanted: Any) -> None:
    for name, value in wanted.items():
        if getattr(shape, name) != value:
            raise ModelError(
                f"export: no family of models there has model.{name}={getattr(shape, name)} together with "
                f"model.positions={shape.positions}; it would need {value}"
            )
