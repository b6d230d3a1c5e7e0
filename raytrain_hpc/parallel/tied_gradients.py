"""Gradient sums of a parameter whose gradient is split over ranks, or over two tied copies on one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.state.sharded_state import to_local
from raytrain_hpc.torch_private import foreach_copy_


def all_reduce_gradients(parameters: Sequence[nn.Parameter], axis: Axis) -> None:
    """All-reduce the gradients of `parameters` over an axis, in place, in one collective.

    If a parameter is sharded, all ranks of the axis must have the same shard.
    """
    grads = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not grads:
        return
    summed = axis.all_reduce(torch.cat([grad.reshape(-1) for grad in grads]))
    sums = torch.split(summed, [grad.numel() for grad in grads])
    foreach_copy_(grads, [summed_grad.view_as(grad) for summed_grad, grad in zip(sums, grads, strict=True)])


def sum_tied_gradients(first: nn.Parameter, second: nn.Parameter) -> None:
    """Set the gradients of two copies of a weight on one rank to their sum."""
    first_grad, second_grad = _get_local_gradient(first), _get_local_gradient(second)
    if first_grad is not None and second_grad is not None:
        first_grad.add_(second_grad)
        second_grad.copy_(first_grad)


def _get_local_gradient(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else to_local(parameter.grad)


__all__ = ["all_reduce_gradients", "sum_tied_gradients"]
