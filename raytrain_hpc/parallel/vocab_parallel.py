"""Vocabulary-parallel embedding and loss: vocabulary rows are sharded, and no rank holds all logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.model.decoder import IGNORE_INDEX
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
    loss: Tensor = _VocabParallelCrossEntropy.apply(wide_logits, targets, axis, axis.get_local_range(vocab_size))  # type: ignore[no-untyped-call]
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, local_rows: range) -> Tensor:
        local_max = logits.amax(dim=-1) if local_rows else logits.new_full(logits.shape[:-1], -math.inf)
        max_logit = axis.all_reduce_max(local_max)
        exponentials = (logits - max_logit.unsqueeze(-1)).exp_()
        is_local = (targets >= local_rows.start) & (targets < local_rows.stop)
        column = ((targets - local_rows.start) * is_local).unsqueeze(-1)
        target_logit = logits.gather(-1, column).squeeze(-1) * is_local if local_rows else torch.zeros_like(max_logit)
        # One collective for both sums: of exponentials, and of the target logits.
        total, target_logit = axis.all_reduce(torch.stack((exponentials.sum(dim=-1), target_logit))).unbind()
        is_valid = targets != IGNORE_INDEX
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), column, is_local, is_valid)
        return ((total.log() + max_logit - target_logit) * is_valid).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, is_local, is_valid = ctx.saved_tensors
        grad_logits = probabilities
        if probabilities.shape[-1]:
            grad_logits = probabilities.scatter_add(-1, column, -is_local.to(probabilities.dtype).unsqueeze(-1))
        return grad_logits.mul_((gradients[0] * is_valid).unsqueeze(-1)), None, None, None
