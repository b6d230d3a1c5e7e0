"""Vocabulary-parallel embedding and loss: vocabulary rows are sharded, and no rank holds all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.model.cross_entropy import VocabularyShard, compute_cross_entropy
from raytrain_hpc.parallel.mesh_axis import Axis


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are sharded over an axis. Outputs are reduce-scattered over positions."""

    def __init__(self, vocab_size: int, hidden_size: int, axis: Axis):
        super().__init__()
        self._axis, self._local_rows = axis, axis.get_local_range(vocab_size)
        self.weight = nn.Parameter(torch.empty(len(self._local_rows), hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return embeddings [b, local t, hidden_size] of tokens int64 [b, t]."""
        if self._local_rows:
            is_local = (tokens >= self._local_rows.start) & (tokens < self._local_rows.stop)
            embeddings = F.embedding((tokens - self._local_rows.start) * is_local, self.weight) * is_local.unsqueeze(-1)
        else:  # no local rows: return zeros, but give the empty weight a gradient
            embeddings = self.weight.new_zeros((*tokens.shape, self.weight.shape[1])) + self.weight.sum()
        return self._axis.reduce_scatter(embeddings, dim=1)


def vocab_parallel_loss_sum(logits: Tensor, targets: Tensor, axis: Axis, vocab_size: int) -> Tensor:
    """Compute `model.decoder.loss_sum` of logits [b, t, local rows]; the same scalar on all ranks.

    Allocates no tensor with full vocabulary size (Shoeybi et al. 2019, arXiv 1909.08053).
    """
    wide_logits = logits if logits.dtype == torch.float64 else logits.float()
    loss: Tensor = _VocabParallelCrossEntropy.apply(wide_logits, targets, make_vocabulary_shard(axis, vocab_size))  # type: ignore[no-untyped-call]
    return loss


def make_vocabulary_shard(axis: Axis, vocab_size: int) -> VocabularyShard:
    """Return the vocabulary rows of this rank, with reductions over the axis."""
    return VocabularyShard(axis.get_local_range(vocab_size), axis.all_reduce_max, axis.all_reduce)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.entropy = entropy = compute_cross_entropy(logits, targets, shard)
        return entropy.loss.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.entropy.compute_grad(gradients[0]), None, None
