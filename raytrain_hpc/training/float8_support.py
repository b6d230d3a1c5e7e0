"""Whether this process's device computes in float8."""

from __future__ import annotations

import torch

from raytrain_hpc.torch_device import get_device_name, has_float8, is_accelerator


def list_without_float8(device: torch.device) -> tuple[str, ...]:
    """Return the name of a GPU that does not compute in float8, or nothing if it does. CPUs emulate it."""
    return (get_device_name(device),) if is_accelerator(device) and not has_float8(device) else ()
