"""Variable-length attention on GPUs: each document of packed sequences by itself, in one kernel and without a mask.

FlashAttention takes the documents of a batch as one row of positions, with the offsets at which documents start (Dao
2023, arXiv 2307.08691). Its work grows with the squares of the lengths of documents, not of sequences.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_hpc.torch_device import has_varlen_attention
from raytrain_hpc.torch_private import flash_attention, flash_attention_backward

_MAX_HEAD_DIM = 256  # of FlashAttention-2, in multiples of 8
_MAX_BATCHES = 8  # that a pipeline may have in flight between a forward pass and its backward pass


def has_varlen_kernel(q: Tensor) -> bool:
    """Return whether FlashAttention computes attention with queries q [b, heads, t, head_dim]: on GPUs from Ampere."""
    if q.dtype not in (torch.float16, torch.bfloat16) or not has_varlen_attention(q.device):
        return False
    head_dim = q.shape[-1]
    return head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM


def compute_offsets(documents: Tensor) -> Tensor:
    """Return where each document starts and where the last one ends in the flattened batch, int32 [documents + 1].

    documents: document numbers, int64 [b, t]; a document does not continue in the next row. On a GPU, waits for it:
    the number of documents is the size of the result.
    """
    is_start = torch.ones_like(documents, dtype=torch.bool)
    is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = is_start.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=documents.numel()).to(torch.int32)


class OffsetFinder:
    """Finds the offsets of the documents of a batch once for all layers and for the backward pass."""

    def __init__(self) -> None:
        self._found: deque[tuple[Tensor, Tensor]] = deque(maxlen=_MAX_BATCHES)  # keeps `documents` from being reused

    def __call__(self, documents: Tensor) -> Tensor:
        """Return `compute_offsets(documents)`."""
        for found, offsets in self._found:
            if found is documents:
                return offsets
        self._found.appendleft((documents, compute_offsets(documents)))
        return self._found[0][1]


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [b, heads, t, d] and the log-sum-exp [b, heads, t] of causal attention within documents.

    q: [b, heads, t, d]; k, v: [b, kv_heads, t, d]; offsets: of `compute_offsets`.
    """
    batch, heads, length, _ = q.shape
    rows = (_flatten_rows(x) for x in (q, k, v))
    out, lse, *_ = flash_attention(*rows, offsets, offsets, length, length, 0.0, True, False)
    return _restore_rows(out, batch), lse.view(heads, batch, length).transpose(0, 1)


def attend_varlen_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. `out`, `lse`: of `attend_varlen`."""
    batch, heads, length, _ = q.shape
    rows = (_flatten_rows(x) for x in (grad_out, q, k, v, out))
    lse = lse.transpose(0, 1).reshape(heads, batch * length)
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    unused = torch.empty(0, device=q.device)
    gradients = flash_attention_backward(*rows, lse, offsets, offsets, length, length, 0.0, True, rng_state, unused)
    dq, dk, dv = (_restore_rows(gradient, batch) for gradient in gradients)
    return dq, dk, dv


def _flatten_rows(x: Tensor) -> Tensor:
    """Return x [b, heads, t, d] as [b * t, heads, d], a view if heads follow positions in memory."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _restore_rows(rows: Tensor, batch: int) -> Tensor:
    """Return rows [b * t, heads, d] as a view [b, heads, t, d]."""
    return rows.view(batch, -1, *rows.shape[1:]).transpose(1, 2)
