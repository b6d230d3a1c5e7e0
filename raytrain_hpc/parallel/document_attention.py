"""Causal attention within the documents of packed sequences, without a mask: each document is attended to by itself.

The work grows with the squares of the lengths of documents, not of sequences. For CPUs; other devices, compiled code
and ring attention use masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.model.decoder import CausalAttention, causal_attention
from raytrain_hpc.parallel.blockwise_attention import BlockMask, attend, attend_backward

Segment = tuple[int, int, int]  # row, first position, end position

_CAUSAL = BlockMask(causal=True)


def find_segments(documents: Tensor) -> list[Segment]:
    """Return the documents of packed sequences, from document numbers int64 [b, t], in order."""
    length = documents.shape[1]
    changes = (documents[:, 1:] != documents[:, :-1]).nonzero().tolist()
    starts = sorted([*((row, 0) for row in range(len(documents))), *((row, column + 1) for row, column in changes)])
    ends = [*starts[1:], (len(documents), 0)]
    pairs = zip(starts, ends, strict=True)
    return [(row, start, end if end_row == row else length) for (row, start), (end_row, end) in pairs]


class DocumentAttention(nn.Module):
    """Causal attention that keeps to documents. One object for all layers: it finds the segments of a batch once."""

    def __init__(self) -> None:
        super().__init__()
        self._documents: Tensor | None = None  # of the segments that were found last
        self._segments: list[Segment] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Return the output [b, heads, t, head_dim]; see `model.decoder.causal_attention`."""
        if documents is None or q.device.type != "cpu" or torch.compiler.is_compiling():
            return causal_attention(q, k, v, documents)
        if documents is not self._documents:
            self._documents, self._segments = documents, find_segments(documents)
        if len(self._segments) == len(documents):  # one document per row
            return causal_attention(q, k, v)
        output: Tensor = _SegmentAttention.apply(q, k, v, self._segments)  # type: ignore[no-untyped-call]
        return output


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment]) -> Tensor:
        output, lse = _new_heads_last(q), q.new_empty(q.shape[:3])
        for segment in segments:
            part, part_lse = attend(_select(q, segment), _select(k, segment), _select(v, segment), _CAUSAL)
            _select(output, segment).copy_(part)
            row, start, end = segment
            lse[row, :, start:end] = part_lse[0]
        ctx.segments = segments
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, output, lse = ctx.saved_tensors
        dq, dk, dv = (_new_heads_last(x) for x in (q, k, v))
        for segment in ctx.segments:
            row, start, end = segment
            grad_out, q_part, k_part, v_part, out = (_select(x, segment) for x in (gradients[0], q, k, v, output))
            part_lse = lse[row : row + 1, :, start:end].contiguous()
            parts = attend_backward(grad_out, q_part, k_part, v_part, out, part_lse, _CAUSAL)
            for grad, part in zip((dq, dk, dv), parts, strict=True):
                _select(grad, segment).copy_(part)
        return dq, dk, dv, None


def _select(x: Tensor, segment: Segment) -> Tensor:
    row, start, end = segment
    return x[row : row + 1, :, start:end]


def _new_heads_last(x: Tensor) -> Tensor:
    """Return an uninitialized tensor of the shape of x [b, heads, t, d], with heads after positions in memory."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def apply_document_attention(module: nn.Module) -> None:
    """Make the attention of a decoder keep to documents without a mask, in place."""
    attention = DocumentAttention()
    for submodule in list(module.modules()):
        for name, child in list(submodule.named_children()):
            if type(child) is CausalAttention:
                setattr(submodule, name, attention)
