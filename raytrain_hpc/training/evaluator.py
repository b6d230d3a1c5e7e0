"""Evaluation: the mean loss over the validation sets, computed by all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.observability.metrics import get_eval_key
from raytrain_hpc.parallel.pairwise_sum import sum_pairwise
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.training.forward_backward import ForwardBackward
from raytrain_hpc.training.loss_reduction import all_reduce, mask_duplicates
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import AnyBatch

_STOP_CHECK_INTERVAL = 8  # evaluation passes between two checks for a stop request


class EvalBatches(Protocol):
    """Batches of a validation set."""

    @property
    def num_batches(self) -> int:
        """Number of batches per evaluation, at least 1."""

    def get_batch(self, index: int, *, is_padding: bool) -> AnyBatch:
        """Return batch `index` on the device. `is_padding`: it has weight zero."""


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
            sums = self._evaluate_set(eval_set)
            if sums is None:
                return None
            total, num_targets = total + sums[0], num_targets + sums[1]
            if name:
                losses[get_eval_key(name)] = sums[0] / sums[1]
        self.timers.read_and_reset()  # the time of an evaluation belongs to no training step
        return {get_eval_key(): total / num_targets, **losses}

    def _evaluate_set(self, eval_set: EvalBatches) -> tuple[float, float] | None:
        """Return the sum of losses and the number of targets of a set, or None if a stop was requested."""
        layout, num_batches = self.context.layout, eval_set.num_batches
        # Every rank runs the same number of passes, because forward passes can contain collectives.
        num_passes = -(-num_batches // layout.dp_size)
        shape = (num_passes, layout.dp_size, layout.cp, 2)
        sums = torch.zeros(shape, dtype=torch.float64, device=self.context.device)
        local_sums = sums[:, layout.get_dp_rank(self.context.rank), self.context.coordinates["cp"]]
        for first_pass in range(0, num_passes, _STOP_CHECK_INTERVAL):
            if self._is_stop_agreed():
                return None
            count = min(_STOP_CHECK_INTERVAL, num_passes - first_pass)
            losses = self.model_step.evaluate(count, partial(self._read_batch, eval_set, first_pass))
            local_sums[first_pass : first_pass + count] = mask_duplicates(losses, self.context)
        all_reduce(sums, self.context)
        loss_sum, num_targets = sum_pairwise(sums.sum(2).view(-1, 2)[:num_batches]).tolist()
        return loss_sum, num_targets

    def _is_stop_agreed(self) -> bool:
        """Return whether any rank was asked to stop. Collective; the same answer on all ranks."""
        requests = torch.tensor([float(self.control.stop_requested)], dtype=torch.float64, device=self.context.device)
        all_reduce(requests, self.context)
        return bool(requests.item() > 0)

    def _read_batch(self, eval_set: EvalBatches, first_pass: int, number: int) -> AnyBatch:
        """Read this rank's batch of pass `first_pass + number`; past the end of the set, a padding batch."""
        self.control.set_phase("evaluating")
        layout = self.context.layout
        index = (first_pass + number) * layout.dp_size + layout.get_dp_rank(self.context.rank)
        is_padding = index >= eval_set.num_batches
        return eval_set.get_batch(0 if is_padding else index, is_padding=is_padding)
