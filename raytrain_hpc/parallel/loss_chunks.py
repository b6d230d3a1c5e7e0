"""Application of the chunked loss to the head of a decoder, compiled or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_hpc.model.cross_entropy import (
    IGNORE_INDEX,
    ChunkCrossEntropy,
    ChunkedLoss,
    VocabularyShard,
    compute_chunk_cross_entropy,
    get_loss_dtype,
)
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.vocab_parallel import make_vocabulary_shard


def apply_loss_chunks(decoder: Decoder, num_chunks: int, axes: Mapping[str, Axis], *, is_compiled: bool) -> None:
    """Make the head compute the loss in chunks of positions, in place; 1: it returns logits.

    A tiled head returns logits: each tile of its weight is gathered once, for all positions.
    """
    head = decoder.head
    if head is None or num_chunks == 1 or hasattr(head, "tiles"):
        return
    shard = make_vocabulary_shard(axes["tp"], decoder.spec.vocab_size) if "tp" in axes else None
    cross_entropy: ChunkCrossEntropy = CompiledCrossEntropy() if is_compiled else compute_chunk_cross_entropy
    head.chunked_loss = ChunkedLoss(num_chunks, shard, cross_entropy=cross_entropy)


class CompiledCrossEntropy:
    """The cross entropy of a chunk in few kernels, which read logits and write their gradient in the logits' dtype.

    Exponentials are computed again where they are needed instead of stored in fp32. Between ranks that share the
    vocabulary, one compiled function ends and the next one begins.
    """

    def __init__(self) -> None:
        self._find_max, self._sum_exponentials = _compile(_find_max), _compile(_sum_exponentials)
        self._compute_loss, self._compute_all = _compile(_compute_loss), _compile(_compute_all)

    def __call__(
        self, logits: Tensor, targets: Tensor, num_rows: int, shard: VocabularyShard | None, *, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `ChunkCrossEntropy`."""
        if shard is None:
            loss, grad = self._compute_all(logits, targets, num_rows, needs_grad)
            return loss, grad
        if not num_rows:  # fewer rows than ranks: there is nothing to compile, but others wait for this rank
            return compute_chunk_cross_entropy(logits, targets, num_rows, shard, needs_grad=needs_grad)
        columns, is_local = targets - shard.rows.start, (targets >= shard.rows.start) & (targets < shard.rows.stop)
        columns = columns * is_local
        max_logit = shard.all_reduce_max(self._find_max(logits, num_rows))
        sums = shard.all_reduce(self._sum_exponentials(logits, columns, is_local, max_logit, num_rows))
        is_valid = targets != IGNORE_INDEX
        loss, grad = self._compute_loss(logits, columns, is_local, is_valid, max_logit, sums, num_rows, needs_grad)
        return loss, grad


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


def _widen(logits: Tensor, num_rows: int) -> Tensor:
    """Return the first `num_rows` columns of logits in the dtype of losses."""
    return logits[:, :num_rows].to(get_loss_dtype(logits))


def _find_max(logits: Tensor, num_rows: int) -> Tensor:
    return _widen(logits, num_rows).amax(dim=-1, keepdim=True)


def _sum_exponentials(logits: Tensor, column: Tensor, is_local: Tensor, max_logit: Tensor, num_rows: int) -> Tensor:
    """Return the sum of exponentials and the logit of the target, stacked: [2, n, 1]. column: of it, int64 [n]."""
    total = (_widen(logits, num_rows) - max_logit).exp().sum(dim=-1, keepdim=True)
    target_logit = logits.gather(-1, column.unsqueeze(-1)).to(total.dtype) * is_local.unsqueeze(-1)
    return torch.stack((total, target_logit))


def _compute_loss(
    logits: Tensor,
    column: Tensor,
    is_local: Tensor,
    is_valid: Tensor,
    max_logit: Tensor,
    sums: Tensor,
    num_rows: int,
    needs_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of losses and, if needed, the gradient of the logits. No number is divided: that takes longer."""
    total, target_logit = sums.unbind()
    lse, is_valid = total.log() + max_logit, is_valid.unsqueeze(-1)
    loss = ((lse - target_logit) * is_valid).sum()
    if not needs_grad:
        return loss, None
    probabilities = (_widen(logits, num_rows) - lse).exp()
    target = torch.where(is_local, column, -1).to(torch.int32).unsqueeze(-1)
    is_target = torch.arange(num_rows, dtype=torch.int32, device=logits.device) == target
    grad = (probabilities - is_target.to(probabilities.dtype)) * is_valid
    return loss, F.pad(grad.to(logits.dtype), (0, logits.shape[1] - num_rows))


def _compute_all(logits: Tensor, targets: Tensor, num_rows: int, needs_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Compute `ChunkCrossEntropy` of a whole vocabulary.

    The maximum and the sum are written as softmax has them, which the compiler computes in one pass over the logits.
    """
    is_valid = targets != IGNORE_INDEX
    column, max_logit = targets * is_valid, _find_max(logits, num_rows)
    sums = _sum_exponentials(logits, column, is_valid, max_logit, num_rows)
    return _compute_loss(logits, column, is_valid, is_valid, max_logit, sums, num_rows, needs_grad)
