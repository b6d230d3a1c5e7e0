"""Settings that depend on the hardware: `train.dtype=auto` and `train.compile=auto`."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from raytrain_hpc.config.schema import AUTO, Config


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
