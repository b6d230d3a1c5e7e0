"""Causal attention that keeps to the documents of packed sequences.

Without a mask on CPUs, and in bf16 on GPUs. Attention in fp32 on a GPU, which no kernel computes document by document,
uses a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.model.decoder import CausalAttention, causal_attention
from raytrain_hpc.parallel.segment_attention import (
    Segment,
    SegmentMask,
    attend_segments,
    attend_segments_backward,
    find_segments,
)
from raytrain_hpc.parallel.varlen_attention import has_varlen_kernel


class SegmentFinder:
    """Finds the segments of a batch once for all layers."""

    def __init__(self) -> None:
        self._documents: Tensor | None = None  # of the segments that were found last
        self._segments: list[Segment] = []

    def __call__(self, documents: Tensor) -> list[Segment]:
        """Return `find_segments(documents, documents)`."""
        if documents is not self._documents:
            self._documents, self._segments = documents, find_segments(documents, documents)
        return self._segments


class DocumentAttention(nn.Module):
    """Causal attention that keeps to documents."""

    def __init__(self, find: SegmentFinder) -> None:
        super().__init__()
        self._find = find

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Return the output [b, heads, t, head_dim]; see `model.decoder.causal_attention`."""
        is_on_cpu = q.device.type == "cpu"
        if documents is None or not (is_on_cpu or has_varlen_kernel(q)):
            return causal_attention(q, k, v, documents)
        if torch.compiler.is_compiling() or not is_on_cpu:
            output: Tensor = _OperatorAttention.apply(q, k, v, documents)  # type: ignore[no-untyped-call]
            return output
        segments = self._find(documents)
        if len(segments) == len(documents):  # one document per row
            return causal_attention(q, k, v)
        attended: Tensor = _SegmentAttention.apply(q, k, v, segments)  # type: ignore[no-untyped-call]
        return attended


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: list[Segment]) -> Tensor:
        output, lse = attend_segments(q, k, v, SegmentMask(segments, causal=True))
        ctx.segments = segments
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, output, lse = ctx.saved_tensors
        mask = SegmentMask(ctx.segments, causal=True)
        return *attend_segments_backward(gradients[0], q, k, v, output, lse, mask), None


class _OperatorAttention(torch.autograd.Function):
    """The same as one operator: for torch.compile, whose graph does not depend on the documents, and for GPUs.

    Selective activation checkpointing expects the same operations in a recomputed pass, in which the offsets of the
    documents are known already: it does not see those within an operator.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        output, lse = torch.ops.raytrain_hpc.document_attend(q, k, v, documents)
        ctx.save_for_backward(q, k, v, output, lse, documents)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *torch.ops.raytrain_hpc.document_attend_backward(gradients[0], *ctx.saved_tensors), None


def apply_document_attention(module: nn.Module, device: torch.device) -> None:
    """Make the attention of a decoder keep to documents, in place."""
    if device.type != "cpu":
        import raytrain_hpc.parallel.collective_ops  # noqa: F401  registers operators, which CPUs do not need

    attention = DocumentAttention(SegmentFinder())
    for submodule in list(module.modules()):
        for name, child in list(submodule.named_children()):
            if type(child) is CausalAttention:
                setattr(submodule, name, attention)
