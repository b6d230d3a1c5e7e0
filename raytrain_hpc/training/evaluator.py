"""Evaluation: the mean loss over the validation split, computed by all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.parallel.pairwise_sum import sum_pairwise
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.training.device_loader import move_to_device
from raytrain_hpc.training.forward_backward import ForwardBackward
from raytrain_hpc.training.loss_reduction import all_reduce, mask_duplicates
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import Batch

_STOP_CHECK_INTERVAL = 8  # evaluation passes between two checks for a stop request


@dataclass
class Evaluator:
    """Evaluation of the current weights. Batches are split over data-parallel ranks; the order of sums is fixed."""

    context: ParallelContext
    model_step: ForwardBackward
    eval_set: EvaluationSet
    control: ControlChannel
    timers: PhaseTimer

    def evaluate(self) -> float | None:
        """Return the mean loss per valid token of the validation set, or None if a stop was requested meanwhile.

        Collective over all ranks, which all return the same.
        """
        layout, num_batches = self.context.layout, self.eval_set.num_batches
        # Every rank runs the same number of passes, because forward passes can contain collectives.
        num_passes = -(-num_batches // layout.dp_size)
        shape = (num_passes, layout.dp_size, layout.cp, 2)
        sums = torch.zeros(shape, dtype=torch.float64, device=self.context.device)
        local_sums = sums[:, layout.get_dp_rank(self.context.rank), self.context.coordinates["cp"]]
        for first_pass in range(0, num_passes, _STOP_CHECK_INTERVAL):
            if self._is_stop_agreed():
                return None
            count = min(_STOP_CHECK_INTERVAL, num_passes - first_pass)
            losses = self.model_step.evaluate(count, partial(self._read_batch, first_pass))
            local_sums[first_pass : first_pass + count] = mask_duplicates(losses, self.context)
        all_reduce(sums, self.context)
        self.timers.read_and_reset()  # the time of an evaluation belongs to no training step
        loss_sum, num_tokens = sum_pairwise(sums.sum(2).view(-1, 2)[:num_batches]).tolist()
        return float(loss_sum / num_tokens)

    def _is_stop_agreed(self) -> bool:
        """Return whether any rank was asked to stop. Collective; the same answer on all ranks."""
        requests = torch.tensor([float(self.control.stop_requested)], dtype=torch.float64, device=self.context.device)
        all_reduce(requests, self.context)
        return bool(requests.item() > 0)

    def _read_batch(self, first_pass: int, number: int) -> Batch:
        """Read this rank's batch of pass `first_pass + number`; past the end of the set, a padding batch."""
        self.control.set_phase("evaluating")
        layout = self.context.layout
        index = (first_pass + number) * layout.dp_size + layout.get_dp_rank(self.context.rank)
        is_padding = index >= self.eval_set.num_batches
        batch = self.eval_set.get_batch(0 if is_padding else index)
        return move_to_device(batch, self.context.device, is_padding=is_padding)
