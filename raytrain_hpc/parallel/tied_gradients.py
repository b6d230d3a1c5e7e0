"""Gradients that ranks of an axis complete by adding theirs up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.state.sharded_state import to_local


def all_reduce_gradients(parameters: Sequence[nn.Parameter], axis: Axis) -> None:
    """Replace the gradients of these parameters by their sums over an axis, in one collective.

    Where a parameter is sharded, all ranks of the axis have the same shard of it.
    """
    slices = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not slices:
        return
    summed = axis.all_reduce(torch.cat([piece.reshape(-1) for piece in slices]))
    parts = torch.split(summed, [piece.numel() for piece in slices])
    torch._foreach_copy_(slices, [part.view_as(piece) for part, piece in zip(parts, slices, strict=True)])


def sum_tied_gradients(first: nn.Parameter, second: nn.Parameter) -> None:
    """Give two copies of a weight on one rank the sum of their gradients."""
    one, other = _get_local_gradient(first), _get_local_gradient(second)
    if one is not None and other is not None:
        one.add_(other)
        other.copy_(one)


def _get_local_gradient(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else to_local(parameter.grad)


__all__ = ["all_reduce_gradients", "sum_tied_gradients"]
