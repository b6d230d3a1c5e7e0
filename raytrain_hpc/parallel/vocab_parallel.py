"""Tables and losses whose vocabulary is shared out over a tensor axis: no rank ever holds all logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.model.decoder import IGNORE_INDEX
from raytrain_hpc.parallel.mesh_axis import Axis


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of a table of `rows`. Gives its share of the positions, summed over the ranks' rows."""

    def __init__(self, vocab_size: int, hidden_size: int, axis: Axis):
        super().__init__()
        self._axis, self._local_rows = axis, axis.get_local_range(vocab_size)
        self.weight = nn.Parameter(torch.empty(len(self._local_rows), hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """Vectors [b, share of t, width] of tokens int64 [b, t]."""
        if self._local_rows:
            mine = (tokens >= self._local_rows.start) & (tokens < self._local_rows.stop)
            found = F.embedding((tokens - self._local_rows.start) * mine, self.weight) * mine.unsqueeze(-1)
        else:  # fewer tokens than ranks: nothing here, but a gradient of nothing
            found = self.weight.new_zeros((*tokens.shape, self.weight.shape[1])) + self.weight.sum()
        return self._axis.reduce_scatter(found, dim=1)


def vocab_parallel_loss_sum(logits: Tensor, targets: Tensor, axis: Axis, vocab_size: int) -> Tensor:
    """`model.decoder.loss_sum` of logits [b, t, share of rows], the same scalar on every rank.

    Holds nothing of the size of the whole vocabulary (Shoeybi et al. 2019, arXiv 1909.08053).
    """
    exact = logits if logits.dtype == torch.float64 else logits.float()
    loss: Tensor = _VocabParallelCrossEntropy.apply(exact, targets, axis, axis.get_local_range(vocab_size))  # type: ignore[no-untyped-call]
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, local_rows: range) -> Tensor:
        here_highest = logits.amax(dim=-1) if local_rows else logits.new_full(logits.shape[:-1], -math.inf)
        highest = axis.all_reduce_max(here_highest)
        exponentials = (logits - highest.unsqueeze(-1)).exp_()
        here = (targets >= local_rows.start) & (targets < local_rows.stop)
        column = ((targets - local_rows.start) * here).unsqueeze(-1)
        of_target = logits.gather(-1, column).squeeze(-1) * here if local_rows else torch.zeros_like(highest)
        # One collective for both sums.
        total, of_target = axis.all_reduce(torch.stack((exponentials.sum(dim=-1), of_target))).unbind()
        counted = targets != IGNORE_INDEX
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), column, here, counted)
        return ((total.log() + highest - of_target) * counted).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, here, counted = ctx.saved_tensors
        slope = probabilities
        if probabilities.shape[-1]:
            slope = probabilities.scatter_add(-1, column, -here.to(probabilities.dtype).unsqueeze(-1))
        return slope.mul_((gradients[0] * counted).unsqueeze(-1)), None, None, None
