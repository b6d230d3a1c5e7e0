"""Forward and backward passes of a step over this rank's microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.parallel.precision import autocast
from raytrain_hpc.training.running_statistics import RunningStatistics
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import AnyBatch, TrainModule

BatchReader = Callable[[int], AnyBatch]  # returns the n-th microbatch of this rank


class ForwardBackward(Protocol):
    """Executor of the forward and backward passes of a rank."""

    def train(self, step: int, num_microbatches: int, read_batch: BatchReader) -> Tensor:
        """Leave the summed gradients of all microbatches on the parameters.

        Returns fp64 [num_microbatches, 2]: the sum of losses and the number of valid targets of each microbatch. Rows
        are zero for padding, and on ranks that do not compute the loss.
        """

    def recompute(self, step: int, batch: AnyBatch) -> Tensor:
        """Run the passes of one microbatch for its trace only, before those of `train`; the tracer drops its gradients.

        Returns fp64 [2]: the sum of losses and the number of valid targets.
        """

    def evaluate(self, num_microbatches: int, read_batch: BatchReader) -> Tensor:
        """Return the same sums as `train`, without computing gradients."""


@dataclass
class LocalForwardBackward:
    """Executor for a model without pipeline parallelism: one microbatch after another."""

    train_module: TrainModule
    model: ParallelModel
    dtype: str
    device: torch.device
    timers: PhaseTimer
    running_statistics: RunningStatistics
    tracer: ComputationTracer = field(default_factory=ComputationTracer)

    def train(self, step: int, num_microbatches: int, read_batch: BatchReader) -> Tensor:
        """Implement `ForwardBackward.train`."""
        with self.timers.phase("forward"):
            self.model.prepare_passes(is_training=True)
        sums = torch.zeros(num_microbatches, 2, dtype=torch.float64, device=self.device)
        for number in range(num_microbatches):
            batch = read_batch(number)
            self._run_passes(step, number, batch, sums[number], is_last=number == num_microbatches - 1)
            self.running_statistics.post_microbatch(number)
        self.tracer.leave_microbatches()
        with self.timers.phase("communication"):
            self.model.finish_grad_sync()
        return sums

    def recompute(self, step: int, batch: AnyBatch) -> Tensor:
        """Implement `ForwardBackward.recompute`."""
        self.model.prepare_passes(is_training=True)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self._run_passes(step, 0, batch, sums, is_last=False)
        self.running_statistics.pre_microbatch()  # restores them
        return sums

    def _run_passes(self, step: int, number: int, batch: AnyBatch, sums: Tensor, *, is_last: bool) -> None:
        """Run the forward and backward pass of a microbatch; `number`: among those of this rank."""
        self.tracer.enter_microbatch(number)
        self.running_statistics.pre_microbatch()
        with self.timers.phase("forward"), autocast(self.dtype, self.device):
            output = self.train_module.forward(self.model.modules[0], batch.inputs, step, batch)
            loss, count = self.train_module.loss(output, batch)
        with (
            self.timers.phase("backward"),
            self.model.gradient_sync.backward_context(0, number, is_last=is_last),
        ):
            (loss * 0.0 if batch.is_padding else loss).backward()  # type: ignore[no-untyped-call]
        self.running_statistics.trace(self.tracer)
        record_loss(sums, loss, count, batch)

    def evaluate(self, num_microbatches: int, read_batch: BatchReader) -> Tensor:
        """Implement `ForwardBackward.evaluate`."""
        module = self.model.modules[0]
        self.model.prepare_passes(is_training=False)
        sums = torch.zeros(num_microbatches, 2, dtype=torch.float64, device=self.device)
        with torch.no_grad(), autocast(self.dtype, self.device):
            for number in range(num_microbatches):
                batch = read_batch(number)
                output = self.train_module.forward(module, batch.inputs, 0, batch)
                record_loss(sums[number], *self.train_module.loss(output, batch), batch)
                del output
        return sums


def record_loss(sums: Tensor, loss: Tensor, count: int | float | Tensor, batch: AnyBatch) -> None:
    """Store a microbatch's (sum of losses, valid targets) in `sums`, unless it is padding."""
    if not batch.is_padding:
        sums[0], sums[1] = loss.detach(), count
