"""The architecture of a torchtitan model: sizes from its weights, and from settings what weights do not show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raytrain_hpc.config.loader import Setting, build_config, load_config, parse_override
from raytrain_hpc.config.model_spec import ModelSpec, resolve_model_spec
from raytrain_hpc.config.presets import PRESETS
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.dcp.metadata_reader import DcpTensor
from raytrain_hpc.dcp.torchtitan_names import EMBEDDING, HEAD
from raytrain_hpc.errors import ConfigError, ModelError
from raytrain_hpc.huggingface.atomic_dir import read_json

SEQ_LEN_KEY = "train.seq_len"
# Keys of params.json (Meta), which are also fields of torchtitan's model arguments.
_PARAMS = {
    "dim": "model.hidden_size",
    "n_layers": "model.num_layers",
    "n_heads": "model.num_heads",
    "n_kv_heads": "model.num_kv_heads",
    "head_dim": "model.head_dim",
    "norm_eps": "model.norm_eps",
    "rope_theta": "model.rope_theta",
    "enable_weight_tying": "model.tie_embeddings",
    "max_seq_len": SEQ_LEN_KEY,
}
_ROPE_SCALING_PARAMS = {
    "scaling_factor": "model.rope_factor",
    "low_freq_factor": "model.rope_low_freq_factor",
    "high_freq_factor": "model.rope_high_freq_factor",
    "original_max_position_embeddings": "model.rope_original_max_positions",
}
_REQUIRED = {
    "model.rope_theta": "the base of the rotary frequencies (500000 for Llama 3)",
    "model.norm_eps": "the epsilon of the norms (1e-5 for Llama 3)",
    SEQ_LEN_KEY: "the context length that the model was trained for",
}


def read_settings(recipe: str | None, overrides: Sequence[str], params: Path | None) -> list[Setting]:
    """Return the settings of the architecture: those of params.json, then of a recipe, then `key=value` words.

    Of a recipe, only `model.*` and train.seq_len are used. Raises ConfigError for any other key among the words and for
    rotary scaling by an unknown factor, and ModelError if params.json cannot be read.
    """
    arguments = {} if params is None else read_json(params)
    settings = _list_params(arguments, str(params))
    if recipe is not None:
        settings += [s for s in load_config(recipe).settings if _describes_model(s.key)]
    for setting in map(parse_override, overrides):
        if not _describes_model(setting.key):
            remedy = f"import-dcp takes model.* and {SEQ_LEN_KEY}; remove it"
            raise ConfigError(setting.key, setting.value, setting.origin, remedy)
        settings.append(setting)
    if arguments.get("use_scaled_rope") and not any(setting.key == "model.rope_factor" for setting in settings):
        remedy = "use_scaled_rope does not tell the factor; add model.rope_factor=8 (Llama 3.1) or 32 (Llama 3.2)"
        raise ConfigError("model.rope_factor", "", str(params), remedy)
    return settings


def _describes_model(key: str) -> bool:
    return (key.startswith("model.") and key != "model.hf") or key == SEQ_LEN_KEY


def _list_params(arguments: Mapping[str, Any], origin: str) -> list[Setting]:
    """Return the settings of params.json, without those that weights imply or that only training needs."""
    values = {_PARAMS[key]: value for key, value in arguments.items() if key in _PARAMS}
    scaling = arguments.get("rope_scaling_args")
    if isinstance(scaling, Mapping):
        values |= {_ROPE_SCALING_PARAMS[key]: value for key, value in scaling.items() if key in _ROPE_SCALING_PARAMS}
    return [Setting(key, value, origin) for key, value in values.items() if value is not None]


def resolve_model(source: Path, weights: Mapping[str, DcpTensor], settings: Sequence[Setting]) -> tuple[ModelSpec, int]:
    """Return the model's architecture and the context length that it was trained for.

    Raises ConfigError if a setting is missing or contradicts the weights, and ModelError for weights that are not those
    of a decoder.
    """
    hidden_size = _get_shape(source, weights, EMBEDDING, 2)[1]
    given = _build_given(hidden_size, settings)
    derived = _derive(source, weights, given)
    _refuse_contradictions(source, given, derived)
    for key, meaning in _REQUIRED.items():
        if not given.origin(key) and not given.model.preset:
            raise _make_missing_error(source, key, meaning)
    config = build_config([*(Setting(f"model.{key}", value, str(source)) for key, value in derived.items()), *settings])
    _refuse_contradictions(source, config, derived)
    return resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len), config.train.seq_len


def _build_given(hidden_size: int, settings: Sequence[Setting]) -> Config:
    """Return a config of the settings alone, whose origins tell which they are. Raises ConfigError for an invalid one.

    Heads and sizes that are not set have values with which no rule between keys fails.
    """
    presets = [str(setting.value) for setting in settings if setting.key == "model.preset"]
    preset = PRESETS.get(presets[-1], {}) if presets else {}
    neutral = {"num_heads": 1, "hidden_size": hidden_size}
    first = [Setting(f"model.{key}", value, "") for key, value in neutral.items() if key not in preset]
    return build_config([*first, *settings, Setting("model.num_kv_heads", AUTO, "")])


def _derive(source: Path, weights: Mapping[str, DcpTensor], given: Config) -> dict[str, Any]:
    """Return the settings of section `model` that the weights imply."""
    vocab_size, hidden_size = _get_shape(source, weights, EMBEDDING, 2)
    layers = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    query_rows = _get_shape(source, weights, "layers.0.attention.wq.weight", 2)[0]
    key_rows = _get_shape(source, weights, "layers.0.attention.wk.weight", 2)[0]
    head_dim = _get_head_dim(source, weights, given, query_rows)
    if key_rows % head_dim:
        remedy = f"its heads would have {head_dim} channels, which does not divide the {key_rows} rows of wk"
        raise ConfigError("model.num_heads", query_rows // head_dim, given.origin("model.num_heads"), remedy)
    is_tied = bool(given.origin("model.tie_embeddings")) and given.model.tie_embeddings
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_layers": len(layers),
        "num_heads": query_rows // head_dim,
        "num_kv_heads": key_rows // head_dim,
        "head_dim": head_dim,
        "ffn_size": _get_shape(source, weights, "layers.0.feed_forward.w1.weight", 2)[0],
        "qk_norm": "layers.0.attention.q_norm.weight" in weights,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position_embedding": "rotary",
        "bias": False,
        "num_experts": 0,
        "tie_embeddings": HEAD not in weights or is_tied,
    }


def _get_head_dim(source: Path, weights: Mapping[str, DcpTensor], given: Config, query_rows: int) -> int:
    """Return the channels per head: as set, as the norm of queries has, or from the number of heads."""
    norm = weights.get("layers.0.attention.q_norm.weight")
    if norm is not None:
        head_dim, key = norm.shape[0], "model.head_dim"
    elif given.model.head_dim != AUTO:
        head_dim, key = int(given.model.head_dim), "model.head_dim"
    elif given.origin("model.num_heads"):
        num_heads = given.model.num_heads
        head_dim, key = (0 if query_rows % num_heads else query_rows // num_heads), "model.num_heads"
    else:
        raise _make_missing_error(source, "model.num_heads", "the number of attention heads")
    if head_dim < 1 or query_rows % head_dim:
        value = getattr(given.model, key.partition(".")[2])
        raise ConfigError(key, value, given.origin(key), f"does not divide the {query_rows} rows of wq in {source}")
    return head_dim


def _get_shape(source: Path, weights: Mapping[str, DcpTensor], name: str, dims: int) -> tuple[int, ...]:
    if name not in weights:
        raise ModelError(f"{source}: lacks {name}")
    if len(weights[name].shape) != dims:
        raise ModelError(f"{source}: {name} is {list(weights[name].shape)}; it must have {dims} dimensions")
    return weights[name].shape


def _refuse_contradictions(source: Path, config: Config, derived: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first setting that the weights contradict."""
    for key, value in derived.items():
        origin, actual = config.origin(f"model.{key}"), getattr(config.model, key)
        if origin and actual not in (AUTO, value):
            raise ConfigError(f"model.{key}", actual, origin, f"the weights in {source} imply {value}; remove it")


def _make_missing_error(source: Path, key: str, meaning: str) -> ConfigError:
    remedy = f"is not stored in {source}; give {meaning} as {key}=..., or with a recipe or --params FILE"
    return ConfigError(key, "", "", remedy)
