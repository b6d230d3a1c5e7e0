"""Evaluation: the mean loss over the validation sets, computed by all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from raytrain_hpc.data.loader.eval_set import make_no_target_error
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import DataError
from raytrain_hpc.observability.metrics import get_eval_key
from raytrain_hpc.parallel.pairwise_sum import sum_pairwise
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.training.forward_backward import ForwardBackward
from raytrain_hpc.training.loss_reduction import all_reduce, make_duplicate_mask
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import AnyBatch

_STOP_CHECK_INTERVAL = 8  # evaluation passes between two checks for a stop request


class EvalBatches(Protocol):
    """Batches of a validation set."""

    def count_batches(self, first: int, limit: int) -> int:
        """Return how many of the `limit` batches from `first` on exist. 0 begins an evaluation; at least one exists.

        Call for consecutive ranges: a stream is read up to the end of the range.
        """

    def get_batch(self, index: int, *, is_padding: bool) -> AnyBatch:
        """Return this rank's batch `index` of the range counted last, or batch 0, on the device.

        `is_padding`: it has weight zero.
        """


@dataclass
class Evaluator:
    """Evaluation of the current weights. Batches are split over data-parallel ranks; the order of sums is fixed.

    `eval_sets`: by name; a single validation set has the name "".
    """

    context: ParallelContext
    model_step: ForwardBackward
    eval_sets: Mapping[str, EvalBatches]
    control: ControlChannel
    timers: PhaseTimer

    def evaluate(self) -> dict[str, float] | None:
        """Return the mean loss per target as "val/loss", and as "val/NAME/loss" for each set that has a name.

        With several sets, "val/loss" is the mean over all their targets. None: a stop was requested meanwhile.
        Collective over all ranks, which all return the same.
        """
        losses, total, num_targets = {}, 0.0, 0.0
        for name, eval_set in self.eval_sets.items():
            sums = self._evaluate_set(f"validation set {name!r}" if name else "the validation set", eval_set)
            if sums is None:
                return None
            total, num_targets = total + sums[0], num_targets + sums[1]
            if name:
                losses[get_eval_key(name)] = sums[0] / sums[1]
        self.timers.read_and_reset()  # the time of an evaluation belongs to no training step
        return {get_eval_key(): total / num_targets, **losses}

    def _evaluate_set(self, name: str, eval_set: EvalBatches) -> tuple[float, float] | None:
        """Return the sum of losses and the number of targets of a set, or None if a stop was requested."""
        dp_size = self.context.layout.dp_size
        limit = _STOP_CHECK_INTERVAL * dp_size
        losses, num_batches, count = [], 0, limit
        mask = make_duplicate_mask(self.context)
        while count == limit:
            self.control.set_phase("evaluating")
            count = eval_set.count_batches(num_batches, limit)
            if self._is_stop_agreed(count):
                return None
            if count:
                # Every rank runs the same number of passes, because forward passes can contain collectives.
                num_passes = -(-count // dp_size)
                read_batch = partial(self._read_batch, eval_set, num_batches, num_batches + count)
                losses.append(self.model_step.evaluate(num_passes, read_batch) * mask)
                num_batches += count
        return self._sum_over_ranks(name, torch.cat(losses), num_batches)

    def _sum_over_ranks(self, name: str, losses: Tensor, num_batches: int) -> tuple[float, float]:
        """Return the sum of losses and the number of targets. `losses`: this rank's, fp64 [passes, 2].

        Raises DataError on all ranks if there is no target. `name`: of the set, for the message.
        """
        context, layout = self.context, self.context.layout
        shape = (len(losses), layout.dp_size, layout.cp, 2)
        sums = torch.zeros(shape, dtype=torch.float64, device=context.device)
        sums[:, layout.get_dp_rank(context.rank), context.coordinates["cp"]] = losses
        all_reduce(sums, context)
        loss_sum, num_targets = sum_pairwise(sums.sum(2).view(-1, 2)[:num_batches]).tolist()
        if num_targets == 0:
            raise make_no_target_error(name)
        return loss_sum, num_targets

    def _is_stop_agreed(self, num_batches: int) -> bool:
        """Return whether any rank was asked to stop. Collective; the same answer on all ranks.

        Raises DataError if ranks have counted other numbers of batches.
        """
        values = [float(self.control.stop_requested), float(num_batches)]
        totals = torch.tensor(values, dtype=torch.float64, device=self.context.device)
        all_reduce(totals, self.context)
        num_requests, total = totals.tolist()
        if total != num_batches * self.context.layout.world_size:
            raise DataError(
                "val_dataset: ranks read different numbers of batches; its content must be the same for all"
            )
        return bool(num_requests > 0)

    def _read_batch(self, eval_set: EvalBatches, first: int, end: int, number: int) -> AnyBatch:
        """Read this rank's batch of a pass over the batches from `first` on; from `end` on, a padding batch."""
        self.control.set_phase("evaluating")
        layout = self.context.layout
        index = first + number * layout.dp_size + layout.get_dp_rank(self.context.rank)
        return eval_set.get_batch(0 if index >= end else index, is_padding=index >= end)
