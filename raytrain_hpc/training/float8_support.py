"""Whether this process's device computes in float8."""

from __future__ import annotations

import torch

from raytrain_hpc.planner.hardware_defaults import has_float8


def list_without_float8(device: torch.device) -> tuple[str, ...]:
    """Return the name of a GPU that does not compute in float8, or nothing if it does. CPUs emulate it."""
    if device.type != "cuda":
        return ()
    is_supported = has_float8(torch.cuda.get_device_capability(device), is_rocm=torch.version.hip is not None)
    return () if is_supported else (torch.cuda.get_device_name(device),)
