"""Casts of tensors that several products share, or that products inside an operator use."""

from __future__ import annotations

import torch
from torch import Tensor


def cast_for_autocast(x: Tensor) -> Tensor:
    """Cast x to the dtype that autocast would cast it to. Call once if several products share an input."""
    device_type = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device_type):  # autocast does not support meta tensors
        return x
    return x.to(torch.get_autocast_dtype(device_type))
