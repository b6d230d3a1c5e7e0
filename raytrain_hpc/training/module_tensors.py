"""Parameters and buffers of a user's module: which dtypes a run can hold, their cast, and their broadcast as bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, get_dtype_name


def check_dtypes(module: nn.Module, label: str = "model") -> None:
    """Raise ModelError for a parameter or persistent buffer whose dtype the state of a run cannot hold."""
    persistent, known = module.state_dict(), ", ".join(TORCH_DTYPES)
    for name, parameter in module.named_parameters():
        if (dtype := get_dtype_name(parameter.dtype)) not in TORCH_DTYPES:
            pair = "; store complex numbers as torch.view_as_real(...)" if parameter.is_complex() else ""
            raise ModelError(f"{label}: parameter {name} has dtype {dtype}; supported are {known}{pair}")
    for name, buffer in module.named_buffers():
        if name in persistent and (dtype := get_dtype_name(buffer.dtype)) not in TORCH_DTYPES:
            raise ModelError(
                f"{label}: persistent buffer {name} has dtype {dtype}, which a checkpoint cannot hold; register it "
                f"with persistent=False, or use one of {known}"
            )


def cast_floating_point(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point parameters and buffers to `dtype`, in place. Complex buffers stay complex.

    `Module.to` alone would drop their imaginary part. Return the module.
    """
    complex_buffers = [
        (submodule, name, buffer)
        for submodule in module.modules()
        for name, buffer in submodule.named_buffers(recurse=False)
        if buffer.is_complex()
    ]
    for submodule, name, _ in complex_buffers:
        setattr(submodule, name, None)
    module.to(dtype)
    for submodule, name, buffer in complex_buffers:
        setattr(submodule, name, buffer)
    return module


def broadcast_bytes(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Give `tensor` the values of rank 0 of the group, by default of all ranks. Collective.

    As bytes, since a backend does not support every dtype: gloo has neither int16 nor complex numbers.
    """
    received = tensor.detach().contiguous()
    dist.broadcast(received.view(-1).view(torch.uint8), group=group, group_src=0)
    if received.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(received)
