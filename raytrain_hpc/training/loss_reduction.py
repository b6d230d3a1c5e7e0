"""Reduction of a step's losses, token counts and requests over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import DataError
from raytrain_hpc.parallel.pairwise_sum import sum_pairwise
from raytrain_hpc.planner.layout import Batching


class StepRequests(NamedTuple):
    """What ranks ask for after a step: to stop or pause training, to save a checkpoint, or to distrust the state."""

    stop: bool = False
    pause: bool = False
    save: bool = False
    distrust: bool = False


_NUM_REQUESTS = len(StepRequests())


@dataclass(frozen=True)
class StepTotals:
    """Sums of one step over all ranks, on the device: reading them on the host waits for the device.

    `totals`: fp64 [loss sum, valid tokens, ranks that ask for each of `StepRequests`].
    `by_microbatch`: fp64 [V, 2], loss sum and valid tokens per logical microbatch.
    """

    totals: Tensor
    by_microbatch: Tensor

    @property
    def num_tokens(self) -> Tensor:
        """Valid tokens of the global batch, fp64 scalar on the device."""
        return self.totals[1]

    def read(self, grad_norm: Tensor, *, allow_empty: bool = False) -> tuple[float, float, StepRequests]:
        """Return the mean loss per valid token, the gradient norm, and what any rank asks for.

        `grad_norm`: fp64 scalar on the device. This is the one time in a step that the host waits for the device.
        If no token of the global batch counts in the loss, that is NaN, or unless `allow_empty`, DataError is raised on
        all ranks.
        """
        loss_sum, num_tokens, *requests, norm = torch.cat((self.totals, grad_norm.view(1))).tolist()
        if num_tokens == 0 and not allow_empty:
            raise DataError(
                "no token of a global batch counts in the loss, as if all prompts are longer than train.seq_len, or a "
                "loss of your own counts nothing; set fault.on_nan=skip to continue this run without such batches, or "
                "start one in another run.dir with a larger train.seq_len or train.global_batch_size, or other data"
            )
        return loss_sum / num_tokens if num_tokens else math.nan, norm, StepRequests(*(count > 0 for count in requests))

    def get_microbatch_losses(self) -> list[float]:
        """Return the mean loss of every logical microbatch, in order."""
        losses: list[float] = (self.by_microbatch[:, 0] / self.by_microbatch[:, 1].clamp(min=1.0)).tolist()
        return losses


class LossReducer:
    """Sum of losses over ranks in a fixed order, so that every data-parallel degree gives the same bits.

    `num_local_microbatches` is the number of microbatches that this rank runs per step. Where collectives run inside a
    microbatch (lockstep layouts) all ranks run equally many, and the last ones of some ranks are padding.
    """

    def __init__(self, context: ParallelContext, batching: Batching):
        layout = context.layout
        self._context, self._shape = context, (batching.count, layout.cp, 2)
        self._ranges = batching.split_by_rank(layout.dp_size)
        self._local_range = self._ranges[layout.get_dp_rank(context.rank)]
        self.num_local_microbatches = (
            -(-batching.count // layout.dp_size) if layout.is_lockstep else len(self._local_range)
        )
        self._mask = make_duplicate_mask(context)

    def reduce(self, losses: Tensor, requests: StepRequests) -> StepTotals:
        """Sum the losses and requests of all ranks in one all-reduce. Collective over all ranks.

        `losses`: fp64 [num_local_microbatches, 2], loss sum and valid tokens of each microbatch of this rank.
        `requests`: those of this rank.
        """
        context, own = self._context, self._local_range
        if context.world_group is None:  # the same in fewer operations, which small models notice
            asked = [float(request) for request in requests]
            return StepTotals(torch.cat((sum_pairwise(losses), losses.new_tensor(asked))), losses)
        flat = torch.zeros(math.prod(self._shape) + _NUM_REQUESTS, dtype=torch.float64, device=context.device)
        # One row per logical microbatch, filled by one data-parallel rank, and one column per context-parallel rank.
        # Every element has at most one nonzero contribution, so the sum over ranks is exact in any order.
        sums, counts = flat[:-_NUM_REQUESTS].view(self._shape), flat[-_NUM_REQUESTS:]
        torch.mul(losses[: len(own)], self._mask, out=sums[own.start : own.stop, context.coordinates["cp"]])
        if any(requests):
            counts.copy_(torch.tensor(requests))
        all_reduce(flat, context)
        by_microbatch = sums.sum(1)
        return StepTotals(torch.cat((sum_pairwise(by_microbatch), counts)), by_microbatch)

    def is_right(self, losses: Tensor, totals: StepTotals) -> bool:
        """Return whether totals are of the losses of all ranks, which they exchange. Collective over all ranks.

        `losses`: as for `reduce`. For audits.
        """
        if self._context.world_group is None:
            return True
        layout, num_rows = self._context.layout, max(map(len, self._ranges))
        contribution = losses.new_zeros(num_rows, 2)
        torch.mul(losses[: len(self._local_range)], self._mask, out=contribution[: len(self._local_range)])
        contributions = [torch.empty_like(contribution) for _ in range(layout.world_size)]
        dist.all_gather(contributions, contribution, group=self._context.world_group)
        sums = losses.new_zeros(self._shape)
        for rank, of_rank in enumerate(contributions):
            rows = self._ranges[layout.get_dp_rank(rank)]
            sums[rows.start : rows.stop, layout.get_coordinates(rank)["cp"]] += of_rank[: len(rows)]
        return torch.allclose(totals.by_microbatch, sums.sum(1), rtol=0.0, atol=0.0, equal_nan=True)


def make_duplicate_mask(context: ParallelContext) -> Tensor:
    """Return factors, fp64 [2], of loss sum and valid tokens: 0 if another rank contributes them to a sum over all.

    Tensor-parallel ranks compute the same loss, and context-parallel ranks count the same tokens.
    """
    counts = [context.should_count_loss, context.should_count_tokens]
    return torch.tensor(counts, dtype=torch.float64, device=context.device)


def all_reduce(tensor: Tensor, context: ParallelContext) -> None:
    """Sum `tensor` over all ranks in place; a single rank has no process group and keeps it."""
    if context.world_group is not None:
        dist.all_reduce(tensor, group=context.world_group)
