"""Differentiable collectives around layers that a plan shards. Activations outside of them are equal on all ranks.

Since every rank computes the same loss, the gradient of a replicated activation is replicated too. The backward pass of
a sum over ranks is therefore the identity, and that of a gather a slice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raytrain_hpc.parallel.mesh_axis import Axis


def all_reduce_input_gradient(x: Tensor, axis: Axis) -> Tensor:
    """Return x, the replicated input of layers that are sharded; its gradient is summed over the ranks."""
    result: Tensor = _AllReduceGradient.apply(x, axis)  # type: ignore[no-untyped-call]
    return result


def all_reduce_output(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum over ranks of partial outputs."""
    result: Tensor = _AllReduce.apply(x, axis)  # type: ignore[no-untyped-call]
    return result


def all_gather_output(x: Tensor, axis: Axis, size: int) -> Tensor:
    """Return the channels of all ranks: [..., local size] -> [..., size]."""
    result: Tensor = _Gather.apply(x, axis, x.ndim - 1, size)  # type: ignore[no-untyped-call]
    return result


def all_gather_positions(x: Tensor, axis: Axis, length: int) -> Tensor:
    """Return the positions of all ranks: [b, local t, ...] -> [b, t, ...]."""
    result: Tensor = _Gather.apply(x, axis, 1, length)  # type: ignore[no-untyped-call]
    return result


def split_input(x: Tensor, axis: Axis) -> Tensor:
    """Return the local channels of a replicated tensor: [..., size] -> [..., local size]."""
    result: Tensor = _Split.apply(x, axis, x.ndim - 1)  # type: ignore[no-untyped-call]
    return result


def split_positions(x: Tensor, axis: Axis) -> Tensor:
    """Return the local positions of a replicated tensor: [b, t, ...] -> [b, local t, ...]."""
    result: Tensor = _Split.apply(x, axis, 1)  # type: ignore[no-untyped-call]
    return result


def _narrow(x: Tensor, axis: Axis, dim: int) -> Tensor:
    local_range = axis.get_local_range(x.shape[dim])
    return x.narrow(dim, local_range.start, len(local_range)).contiguous()


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(gradients[0].clone(memory_format=torch.contiguous_format)), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, size: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.all_gather(x, dim, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _narrow(gradients[0], ctx.axis, ctx.dim), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.size = axis, dim, x.shape[dim]
        return _narrow(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_gather(gradients[0], ctx.dim, ctx.size), None, None
