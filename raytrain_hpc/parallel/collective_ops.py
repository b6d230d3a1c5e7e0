"""Collectives and other untraceable functions as operators of torch, for code that torch.compile traces.

The compiler splits a graph wherever it cannot trace Python code. An operator is one node of the graph, with a function
for the shapes of its results, so that a block with its communication is one graph. A graph holds no Python objects:
operators name their axis, and this module keeps the axes of the current generation by name. Groups that are formed
anew after a fault have the same names, and nothing is compiled again for them.

Operators run the code that is used without a compiler, and give the same bits. Import this module before compiling.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from raytrain_hpc.model.grouped_linear import compute_grouped_weight_grad, grouped_linear
from raytrain_hpc.parallel.blockwise_attention import get_lse_dtype
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.ring_attention import Ring, ring_attend, ring_attend_backward
from raytrain_hpc.parallel.segment_attention import (
    SegmentMask,
    attend_segments,
    attend_segments_backward,
    find_segments,
)
from raytrain_hpc.parallel.varlen_attention import (
    OffsetFinder,
    attend_varlen,
    attend_varlen_backward,
    has_varlen_kernel,
)

_axes: WeakValueDictionary[str, Axis] = WeakValueDictionary()  # gloo closes a group with its last reference
_find_offsets = OffsetFinder()


def set_axes(axes: Mapping[str, Axis]) -> None:
    """Set the axes that operators use, by name. Call in each generation, before the model runs."""
    _axes.clear()
    _axes.update(axes)


@torch.library.custom_op("raytrain_hpc::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, axis: str) -> Tensor:
    return _axes[axis].all_reduce(x.clone(memory_format=torch.contiguous_format))


@_all_reduce.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("raytrain_hpc::all_gather_stacked", mutates_args=())
def _all_gather_stacked(x: Tensor, axis: str) -> Tensor:
    return _axes[axis].all_gather_stacked(x)


@_all_gather_stacked.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty((_axes[axis].size, *x.shape))


@torch.library.custom_op("raytrain_hpc::reduce_scatter_stacked", mutates_args=())
def _reduce_scatter_stacked(x: Tensor, axis: str) -> Tensor:
    return _axes[axis].reduce_scatter_stacked(x)


@_reduce_scatter_stacked.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape[1:])


@torch.library.custom_op("raytrain_hpc::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, axis: str, recv_sizes: list[int], send_sizes: list[int]) -> Tensor:
    return _axes[axis].all_to_all(x, recv_sizes, send_sizes)


@_all_to_all.register_fake
def _(x: Tensor, axis: str, recv_sizes: list[int], send_sizes: list[int]) -> Tensor:
    return x.new_empty((sum(recv_sizes), *x.shape[1:]))


@torch.library.custom_op("raytrain_hpc::ring_attend", mutates_args=())
def _ring_attend(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, axis: str, seq_len: int
) -> tuple[Tensor, Tensor]:
    out, lse = ring_attend(q, k, v, documents, Ring.create(_axes[axis], seq_len))
    return out.contiguous(), lse.contiguous()


@_ring_attend.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=get_lse_dtype(q))


@torch.library.custom_op("raytrain_hpc::ring_attend_backward", mutates_args=())
def _ring_attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    axis: str,
    seq_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    ring = Ring.create(_axes[axis], seq_len)
    dq, dk, dv = ring_attend_backward(grad_out, q, k, v, out, lse, documents, ring)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_ring_attend_backward.register_fake
def _(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | str | int | None
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("raytrain_hpc::document_attend", mutates_args=())
def _document_attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    if has_varlen_kernel(q):
        out, lse = attend_varlen(q, k, v, _find_offsets(documents))
    else:
        out, lse = attend_segments(q, k, v, SegmentMask(find_segments(documents, documents), causal=True))
    return _order_positions_first(out), lse.contiguous()


@_document_attend.register_fake
def _(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return _order_positions_first(torch.empty_like(q)), q.new_empty(q.shape[:3], dtype=get_lse_dtype(q))


@torch.library.custom_op("raytrain_hpc::document_attend_backward", mutates_args=())
def _document_attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if has_varlen_kernel(q):
        gradients = attend_varlen_backward(grad_out, q, k, v, out, lse, _find_offsets(documents))
    else:
        mask = SegmentMask(find_segments(documents, documents), causal=True)
        gradients = attend_segments_backward(grad_out, q, k, v, out, lse, mask)
    dq, dk, dv = map(_order_positions_first, gradients)
    return dq, dk, dv


@_document_attend_backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_order_positions_first(torch.empty_like(x)) for x in (q, k, v))
    return dq, dk, dv


def _order_positions_first(x: Tensor) -> Tensor:
    """Return x [b, heads, t, d] with heads after positions in memory, in which the next operation reads it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op("raytrain_hpc::grouped_linear", mutates_args=())
def _grouped_linear(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return grouped_linear(rows, weight, sizes)


@_grouped_linear.register_fake
def _(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


@torch.library.custom_op("raytrain_hpc::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(grad_out: Tensor, rows: Tensor, weight: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    return grouped_linear(grad_out, weight.mT, sizes), compute_grouped_weight_grad(grad_out, rows, sizes)


@_grouped_linear_backward.register_fake
def _(grad_out: Tensor, rows: Tensor, weight: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)
