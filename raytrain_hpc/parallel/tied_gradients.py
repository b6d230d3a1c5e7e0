"""Gradients that ranks of an axis complete by adding theirs up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.state.sharded_state import local


def sum_over_ranks(parameters: Sequence[nn.Parameter], axis: Axis) -> None:
    """Replace the gradients of these parameters by their sums over an axis, in one collective.

    Where a parameter is sharded, all ranks of the axis have the same shard of it.
    """
    slices = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not slices:
        return
    summed = axis.sum(torch.cat([piece.reshape(-1) for piece in slices]))
    parts = torch.split(summed, [piece.numel() for piece in slices])
    torch._foreach_copy_(slices, [part.view_as(piece) for part, piece in zip(parts, slices, strict=True)])


def sum_two_copies(first: nn.Parameter, second: nn.Parameter) -> None:
    """Give two copies of a weight on one rank the sum of their gradients."""
    one, other = _gradient(first), _gradient(second)
    if one is not None and other is not None:
        one.add_(other)
        other.copy_(one)


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else local(parameter.grad)


__all__ = ["sum_over_ranks", "sum_two_copies"]
