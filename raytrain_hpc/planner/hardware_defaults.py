"""Settings that depend on the hardware: `train.dtype=auto` and `train.compile=auto`, and where float8 is refused."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import ConfigError


def resolve_dtype(config: Config, *, has_bf16: bool) -> Config:
    """Return the config with `train.dtype=auto` resolved: bf16 on accelerators that have it, else fp32."""
    if config.train.dtype != AUTO:
        return config
    resolved = copy(config)
    resolved.train = replace(config.train, dtype="bf16" if has_bf16 else "fp32")
    resolved.origins = config.origins | {"train.dtype": AUTO}
    return resolved


def resolve_compile(config: Config, *, has_accelerator: bool) -> Config:
    """Return the config with `train.compile=auto` resolved: blocks are compiled on accelerators."""
    if config.train.compile != AUTO:
        return config
    resolved = copy(config)
    resolved.train = replace(config.train, compile=has_accelerator)
    resolved.origins = config.origins | {"train.compile": AUTO}
    return resolved


def check_float8(config: Config, without_float8: Sequence[str]) -> None:
    """Raise ConfigError if `train.dtype=float8` and there are devices that do not compute in it, given by name."""
    if config.train.dtype == "float8" and without_float8:
        remedy = f"{', '.join(without_float8)}: no float8 products (NVIDIA, from compute capability 8.9 on); use bf16"
        raise ConfigError("train.dtype", "float8", config.origin("train.dtype"), remedy)
