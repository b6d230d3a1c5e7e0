"""Dtypes of parameters and of the residual stream for each value of `train.dtype`."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from raytrain_hpc.config.training_config import TrainConfig, computes_in_bf16
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.workload import rounds_all_weights


def get_param_dtype(dtype: str) -> torch.dtype:
    """Return the dtype in which parameters are stored: bf16 and float8 runs store fp32."""
    return torch.float64 if dtype == "fp64" else torch.float32


def get_compute_itemsize(dtype: str) -> int:
    """Return the bytes of one element in a matrix product that is not in float8."""
    return 2 if computes_in_bf16(dtype) else get_param_dtype(dtype).itemsize


def get_residual_dtype(train: TrainConfig, layout: Layout) -> torch.dtype:
    """Return the dtype of the residual stream."""
    rounds_all = rounds_all_weights(train.dtype, layout, elastic=train.deterministic == "elastic")
    is_bf16 = rounds_all or (computes_in_bf16(train.dtype) and train.residual_dtype == "bf16")
    return torch.bfloat16 if is_bf16 else get_param_dtype(train.dtype)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for a forward pass: bf16 compute with fp32 weights, or no change for fp32 and fp64."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=computes_in_bf16(dtype))
