"""Attention within the documents of packed sequences, without a mask: each document is attended to by itself.

The work grows with the squares of the lengths of documents, not of sequences. For CPUs: a GPU would run one small
kernel per document, and wait for the host to find the documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raytrain_hpc.parallel.blockwise_attention import MASKED_SCORE, BlockMask, attend, attend_backward, get_lse_dtype


class Segment(NamedTuple):
    """The queries and the keys of one document, as positions in a block of queries and one of keys."""

    row: int
    queries: slice
    keys: slice


@dataclass(frozen=True)
class SegmentMask:
    """The attention mask of a block of queries and keys of packed sequences: that of `BlockMask` in each segment.

    `causal`: queries and keys of a segment are the same positions; a query attends to no later one.
    """

    segments: Sequence[Segment]
    causal: bool


def find_segments(query_documents: Tensor, key_documents: Tensor) -> list[Segment]:
    """Return the documents that have queries and keys, in order.

    query_documents, key_documents: document numbers, int64 [b, t] and [b, s], which do not decrease within a row.
    """
    key_runs = {(row, document): part for row, document, part in _find_runs(key_documents)}
    return [
        Segment(row, queries, key_runs[row, document])
        for row, document, queries in _find_runs(query_documents)
        if (row, document) in key_runs
    ]


def _find_runs(documents: Tensor) -> list[tuple[int, int, slice]]:
    """Return row, document number and positions of each document.

    In numpy: selective activation checkpointing expects the same torch operations in a recomputed pass, in which a
    caller may have the segments already, or no more.
    """
    runs = []
    for row, numbers in enumerate(documents.numpy()):
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        runs += [(row, int(numbers[start]), slice(start, end)) for start, end in pairwise(bounds)]
    return runs


def attend_segments(q: Tensor, k: Tensor, v: Tensor, mask: SegmentMask) -> tuple[Tensor, Tensor]:
    """Return the output [b, heads, t, d] and the log-sum-exp [b, heads, t], as `blockwise_attention.attend` does.

    Queries without keys get zeros and the log-sum-exp of masked scores, and thus weight 0 in `merge_blocks`.
    """
    output = _new_heads_last(q)
    lse = torch.full(q.shape[:3], MASKED_SCORE, dtype=get_lse_dtype(q), device=q.device)
    for row, queries, keys in mask.segments:
        part = (q[row : row + 1, :, queries], k[row : row + 1, :, keys], v[row : row + 1, :, keys])
        output[row : row + 1, :, queries], lse[row : row + 1, :, queries] = attend(*part, BlockMask(mask.causal))
    return output, lse


def attend_segments_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: SegmentMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, as `blockwise_attention.attend_backward` does."""
    dq, dk, dv = (_new_heads_last(x) for x in (q, k, v))
    for row, queries, keys in mask.segments:
        rows = slice(row, row + 1)
        q_part, out_part, grad_part = (x[rows, :, queries] for x in (q, out, grad_out))
        part_lse = lse[rows, :, queries].contiguous()
        parts = attend_backward(
            grad_part, q_part, k[rows, :, keys], v[rows, :, keys], out_part, part_lse, BlockMask(mask.causal)
        )
        for grad, part, positions in zip((dq, dk, dv), parts, (queries, keys, keys), strict=True):
            grad[rows, :, positions] = part
    return dq, dk, dv


def _new_heads_last(x: Tensor) -> Tensor:
    """Return zeros of the shape of x [b, heads, t, d], with heads after positions in memory."""
    batch, heads, length, width = x.shape
    return x.new_zeros(batch, length, heads, width).transpose(1, 2)
