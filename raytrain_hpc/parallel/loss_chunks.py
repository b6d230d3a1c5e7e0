"""Application of the chunked loss to the head of a decoder, compiled or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
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
    """Make the head compute the loss in chunks of positions, in place.

    1: it returns logits, except if their loss over ranks that share the vocabulary is to be compiled. A tiled head
    returns logits: each tile of its weight is gathered once, for all positions.
    """
    head = decoder.head
    needs_head = num_chunks > 1 or (is_compiled and "tp" in axes)
    if head is None or not needs_head or hasattr(head, "tiles"):
        return
    shard = make_vocabulary_shard(axes["tp"], decoder.spec.vocab_size) if "tp" in axes else None
    cross_entropy: ChunkCrossEntropy = CompiledCrossEntropy() if is_compiled else compute_chunk_cross_entropy
    head.chunked_loss = ChunkedLoss(num_chunks, shard, cross_entropy=cross_entropy)


class CompiledCrossEntropy:
    """The cross entropy of a chunk in few kernels, which read logits and write their gradient in the logits' dtype.

    Exponentials are computed again for the gradient instead of stored in fp32. The log-sum-exps end one compiled
    function and begin the next: within one, the compiler would take the logarithm again for every logit.
    """

    def __init__(self) -> None:
        self._find_max, self._sum_exponentials = _compile(_find_max), _compile(_sum_exponentials)
        self._compute_sums, self._compute_grad = _compile(_compute_sums), _compile(_compute_grad)

    def __call__(
        self, logits: Tensor, targets: Tensor, num_rows: int, shard: VocabularyShard | None, *, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `ChunkCrossEntropy`."""
        if not num_rows:  # fewer rows than ranks: there is nothing to compile, but others wait for this rank
            return compute_chunk_cross_entropy(logits, targets, num_rows, shard, needs_grad=needs_grad)
        is_valid = targets != IGNORE_INDEX
        if shard is None:
            is_local, column = is_valid, targets * is_valid
            max_logit, sums = self._compute_sums(logits, column, is_local, num_rows)
        else:
            is_local = (targets >= shard.rows.start) & (targets < shard.rows.stop)
            column = (targets - shard.rows.start) * is_local
            max_logit = shard.all_reduce_max(self._find_max(logits, num_rows))
            sums = shard.all_reduce(self._sum_exponentials(logits, column, is_local, max_logit, num_rows))
        total, target_logit = sums.unbind()
        lse = total.log() + max_logit
        loss = (lse - target_logit).where(is_valid.unsqueeze(-1), 0).sum()
        if not needs_grad:
            return loss, None
        # Infinite where the target is not valid: the gradient is zero then.
        lse, target = lse.where(is_valid.unsqueeze(-1), torch.inf), column.where(is_local, -1)
        return loss, self._compute_grad(logits, lse, target.to(torch.int32).unsqueeze(-1), num_rows)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


def _widen(logits: Tensor, num_rows: int) -> Tensor:
    """Return the first `num_rows` columns of logits in the dtype of losses."""
    return logits[:, :num_rows].to(get_loss_dtype(logits))


def _find_max(logits: Tensor, num_rows: int) -> Tensor:
    """Return the maximum of each row, [n, 1]."""
    return _widen(logits, num_rows).amax(dim=-1, keepdim=True)


def _sum_exponentials(logits: Tensor, column: Tensor, is_local: Tensor, max_logit: Tensor, num_rows: int) -> Tensor:
    """Return the sum of exponentials and the logit of the target, stacked: [2, n, 1]. column: of it, int64 [n]."""
    total = (_widen(logits, num_rows) - max_logit).exp().sum(dim=-1, keepdim=True)
    target_logit = logits.gather(-1, column.unsqueeze(-1)).to(total.dtype) * is_local.unsqueeze(-1)
    return torch.stack((total, target_logit))


def _compute_sums(logits: Tensor, column: Tensor, is_local: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return what `_find_max` and `_sum_exponentials` do."""
    max_logit = _find_max(logits, num_rows)
    return max_logit, _sum_exponentials(logits, column, is_local, max_logit, num_rows)


def _compute_grad(logits: Tensor, lse: Tensor, target: Tensor, num_rows: int) -> Tensor:
    """Return the gradient of logits [n, columns], zero in those that are padding. lse, target: [n, 1]."""
    columns = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    probabilities = (_widen(logits, logits.shape[1]) - lse).exp()
    if logits.shape[1] > num_rows:
        probabilities = torch.where(columns < num_rows, probabilities, 0.0)
    return (probabilities - (columns == target).to(probabilities.dtype)).to(logits.dtype)
