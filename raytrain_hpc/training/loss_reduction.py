"""Reduction of a step's losses, token counts and requests over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.parallel.pairwise_sum import sum_pairwise
from raytrain_hpc.planner.layout import Batching


@dataclass(frozen=True)
class StepRequests:
    """What ranks ask for after a step: to stop or pause training, or to save a checkpoint."""

    stop: bool = False
    pause: bool = False
    save: bool = False


@dataclass(frozen=True)
class StepTotals:
    """Sums of one step over all ranks, on the device: reading them on the host waits for the device.

    `totals`: fp64 [loss sum, valid tokens, ranks that ask to stop, to pause, to save].
    `by_microbatch`: fp64 [V, 2], loss sum and valid tokens per logical microbatch.
    """

    totals: Tensor
    by_microbatch: Tensor

    @property
    def num_tokens(self) -> Tensor:
        """Valid tokens of the global batch, fp64 scalar on the device."""
        return self.totals[1]

    def get_loss_and_requests(self) -> tuple[float, StepRequests]:
        """Return the mean loss per valid token, and what any rank asks for."""
        loss_sum, num_tokens, *requests = self.totals.tolist()
        return loss_sum / num_tokens, StepRequests(*(count > 0 for count in requests))

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
        self._context, self._num_microbatches = context, batching.count
        self._local_range = batching.split_by_rank(layout.dp_size)[layout.get_dp_rank(context.rank)]
        self.num_local_microbatches = (
            -(-batching.count // layout.dp_size) if layout.is_lockstep else len(self._local_range)
        )

    def reduce(self, losses: Tensor, requests: StepRequests) -> StepTotals:
        """Sum the losses and requests of all ranks in one all-reduce. Collective over all ranks.

        `losses`: fp64 [num_local_microbatches, 2], loss sum and valid tokens of each microbatch of this rank.
        `requests`: those of this rank.
        """
        context = self._context
        # One row per logical microbatch, filled by one data-parallel rank, and one column per context-parallel rank.
        # Every element has at most one nonzero contribution, so the sum over ranks is exact in any order.
        shape = (self._num_microbatches + 2, context.layout.cp, 2)  # the last two rows hold the requests
        sums = torch.zeros(shape, dtype=torch.float64, device=context.device)
        local_losses = mask_duplicates(losses, context)[: len(self._local_range)]
        sums[self._local_range.start : self._local_range.stop, context.coordinates["cp"]] = local_losses
        sums[-2, 0] = sums.new_tensor((float(requests.stop), float(requests.pause)))
        sums[-1, 0, 0] = float(requests.save)
        all_reduce(sums, context)
        by_microbatch = sums[:-2].sum(1)
        totals = torch.cat((sum_pairwise(by_microbatch), sums[-2, 0], sums[-1, 0, :1]))
        return StepTotals(totals, by_microbatch)


def mask_duplicates(sums: Tensor, context: ParallelContext) -> Tensor:
    """Zero the entries of fp64 [n, 2] (loss sum, valid tokens) that another rank contributes to a sum over all ranks.

    Tensor-parallel ranks compute the same loss, and context-parallel ranks count the same tokens.
    """
    return sums * sums.new_tensor([context.should_count_loss, context.should_count_tokens])


def all_reduce(tensor: Tensor, context: ParallelContext) -> None:
    """Sum `tensor` over all ranks in place; a single rank has no process group and keeps it."""
    if context.world_group is not None:
        dist.all_reduce(tensor, group=context.world_group)
