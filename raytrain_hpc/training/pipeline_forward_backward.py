"""Forward and backward passes of a step through a pipeline: this rank's stages, and the tensors that each saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn

from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.parallel.deferred_wgrad import WeightGradFn
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.parallel.pipeline_parallel import Pipeline
from raytrain_hpc.parallel.precision import autocast
from raytrain_hpc.planner.pipeline_timeline import Span
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.torch_device import is_accelerator, synchronize
from raytrain_hpc.training.forward_backward import BatchReader, record_loss
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import AnyBatch, TrainModule


@dataclass(frozen=True)
class TimelineReporter:
    """Reporter of this rank's pipeline actions to the driver, every `interval` steps (0: never)."""

    rank: int
    interval: int
    emit: Callable[[Record], None]

    def should_report(self, step: int) -> bool:
        """Return whether the step after `step` committed steps is reported."""
        return self.interval > 0 and (step + 1) % self.interval == 0

    def report(self, step: int, spans: list[Span]) -> None:
        """Emit the begin and end of each action of a step, in unix time."""
        offset = time.time() - time.perf_counter()
        rows = [[s.action.kind, s.action.stage, s.action.microbatch, offset + s.begin, offset + s.end] for s in spans]
        self.emit({"type": "timeline", "rank": self.rank, "step": step + 1, "spans": rows})


@dataclass
class PipelineForwardBackward:
    """Executor for a model split into pipeline stages: runs their actions in the order of the schedule.

    `activation_shape`: (positions, channels) per sample of the tensors that stages exchange; `activation_dtype`: their
    dtype.
    """

    train_module: TrainModule
    model: ParallelModel
    pipeline: Pipeline
    dtype: str
    activation_dtype: torch.dtype
    activation_shape: tuple[int, int]
    device: torch.device
    timeline: TimelineReporter
    timers: PhaseTimer
    tracer: ComputationTracer = field(default_factory=ComputationTracer)

    def train(self, step: int, num_microbatches: int, read_batch: BatchReader) -> Tensor:
        """Implement `ForwardBackward.train`."""
        sums = torch.zeros(num_microbatches, 2, dtype=torch.float64, device=self.device)
        read_batch = cache(read_batch)
        stages = {
            stage: _PipelineStage(self, stage, step, num_microbatches, read_batch, sums) for stage in self.model.modules
        }
        self.model.prepare_passes(is_training=True)
        orders = self.pipeline.schedule.build_orders(num_microbatches)
        wait = None
        if self.timeline.should_report(step) and is_accelerator(self.device):
            wait = partial(synchronize, self.device)
        spans = self.pipeline.run(orders, stages, self._make_buffer_factory(read_batch), wait)
        if self.timeline.should_report(step):
            self.timeline.report(step, spans)
        self.tracer.leave_microbatches()
        with self.timers.phase("communication"):
            self.model.finish_grad_sync()
        return sums

    def recompute(self, step: int, batch: AnyBatch) -> Tensor:
        """Implement `ForwardBackward.recompute`."""
        sums = torch.zeros(1, 2, dtype=torch.float64, device=self.device)

        def read_batch(number: int) -> AnyBatch:
            return batch

        stages = {
            stage: _PipelineStage(self, stage, step, 1, read_batch, sums, ends_step=False)
            for stage in self.model.modules
        }
        self.model.prepare_passes(is_training=True)
        self.pipeline.run(self.pipeline.schedule.build_orders(1), stages, self._make_buffer_factory(read_batch))
        return sums[0]

    def evaluate(self, num_microbatches: int, read_batch: BatchReader) -> Tensor:
        """Implement `ForwardBackward.evaluate`."""
        sums = torch.zeros(num_microbatches, 2, dtype=torch.float64, device=self.device)
        read_batch = cache(read_batch)
        stages = {
            stage: _PipelineStage(self, stage, 0, num_microbatches, read_batch, sums) for stage in self.model.modules
        }
        self.model.prepare_passes(is_training=False)
        with torch.no_grad():
            self.pipeline.run(
                self.pipeline.schedule.build_forward_orders(num_microbatches),
                stages,
                self._make_buffer_factory(read_batch),
            )
        return sums

    def _make_buffer_factory(self, read_batch: BatchReader) -> Callable[[], Tensor]:
        shape = (len(read_batch(0).samples), *self.activation_shape)
        return partial(torch.empty, shape, dtype=self.activation_dtype, device=self.device)


class _PipelineStage:
    """One stage of this rank during one step. `ends_step`: whether the last backward pass completes the gradients."""

    def __init__(
        self,
        forward_backward: PipelineForwardBackward,
        stage: int,
        step: int,
        num_microbatches: int,
        read_batch: BatchReader,
        sums: Tensor,
        *,
        ends_step: bool = True,
    ):
        self._forward_backward, self._stage, self._step, self._read_batch, self._loss_sums = (
            forward_backward,
            stage,
            step,
            read_batch,
            sums,
        )
        self._module: nn.Module = forward_backward.model.modules[stage]
        self._is_last, self._ends_step = stage == forward_backward.pipeline.schedule.num_stages - 1, ends_step
        self._num_pending_backward = num_microbatches  # microbatches whose backward pass has not run yet
        self._saved_tensors: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._deferred_wgrads: dict[int, list[WeightGradFn]] = {}
        self._num_pending_wgrad = num_microbatches  # microbatches whose weight gradients are not computed yet

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Implement `pipeline_parallel.Stage.forward`."""
        batch = self._read_batch(microbatch)
        executor = self._forward_backward
        executor.tracer.enter_microbatch(microbatch)
        if x is not None:
            x.requires_grad_(torch.is_grad_enabled())
        with executor.timers.phase("forward"), autocast(executor.dtype, executor.device):
            inputs = batch.inputs if x is None else x
            output = executor.train_module.forward(self._module, inputs, self._step, batch)
            if self._is_last:
                loss, count = executor.train_module.loss(output, batch)
                record_loss(self._loss_sums[microbatch], loss, count, batch)
                output = loss * 0.0 if batch.is_padding else loss
        if torch.is_grad_enabled():
            self._saved_tensors[microbatch] = (x, output)
        return None if self._is_last else output.detach().to(executor.activation_dtype)

    def backward(self, microbatch: int, gradient: Tensor | None, *, split: bool) -> Tensor | None:
        """Implement `pipeline_parallel.Stage.backward`."""
        x, output = self._saved_tensors.pop(microbatch)
        self._num_pending_backward -= 1
        self._forward_backward.tracer.enter_microbatch(microbatch)
        gradient_sync = self._forward_backward.model.gradient_sync
        is_last = self._ends_step and self._num_pending_backward == 0
        timed_backward = self._forward_backward.timers.phase("backward")
        with timed_backward, gradient_sync.backward_context(self._stage, microbatch, is_last=is_last, split=split):
            if output.requires_grad:  # not if this is the first stage and all of it is frozen
                torch.autograd.backward(output, None if gradient is None else gradient.to(output.dtype))
        if split:
            self._deferred_wgrads[microbatch] = self._forward_backward.model.weight_grad_store.pop_all()
        return None if x is None else x.grad

    def backward_weight(self, microbatch: int) -> None:
        """Implement `pipeline_parallel.Stage.backward_weight`."""
        self._forward_backward.tracer.enter_microbatch(microbatch)
        with self._forward_backward.timers.phase("backward"):
            for compute_wgrad in self._deferred_wgrads.pop(microbatch):
                compute_wgrad()
        self._num_pending_wgrad -= 1
        self._forward_backward.model.gradient_sync.post_backward_weight(
            self._stage, microbatch, is_last=self._ends_step and self._num_pending_wgrad == 0
        )
