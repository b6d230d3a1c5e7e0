"""Settings that depend on the hardware: `train.dtype=auto` and `train.compile=auto`, and where float8 is refused."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import ConfigError

_MIN_FLOAT8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
_MIN_GROUPED_MM_CAPABILITY = (9, 0)


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


def has_float8(capability: tuple[int, int], *, is_rocm: bool) -> bool:
    """Return whether a GPU multiplies e4m3 and e5m2 numbers in the formats of NVIDIA, by its compute capability."""
    return capability >= _MIN_FLOAT8_CAPABILITY and not is_rocm


def has_grouped_mm(capability: tuple[int, int], *, is_rocm: bool) -> bool:
    """Return whether torch multiplies groups of rows in one kernel on a GPU. On others it reads their sizes first."""
    return capability >= _MIN_GROUPED_MM_CAPABILITY and not is_rocm


def check_float8(config: Config, without_float8: Sequence[str]) -> None:
    """Raise ConfigError if `train.dtype=float8` and there are devices that do not compute in it, given by name."""
    if config.train.dtype == "float8" and without_float8:
        remedy = f"{', '.join(without_float8)}: no float8 products (NVIDIA, from compute capability 8.9 on); use bf16"
        raise ConfigError("train.dtype", "float8", config.origin("train.dtype"), remedy)
