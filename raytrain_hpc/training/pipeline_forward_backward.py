"""The passes of a step through a pipeline: this rank's stages, and what each keeps of a microbatch in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from raytrain_hpc.parallel.deferred_wgrad import Later
from raytrain_hpc.parallel.parallelize import Parallel, autocast
from raytrain_hpc.parallel.pipeline_parallel import Pipeline
from raytrain_hpc.planner.pipeline_timeline import Span
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.training.forward_backward import Read, note
from raytrain_hpc.training.timers import Stopwatch
from raytrain_hpc.training.train_module import Batch, Task


@dataclass(frozen=True)
class Timeline:
    """Tells the driver what this rank did when, every so many steps (0: never)."""

    rank: int
    every: int
    emit: Callable[[Record], None]

    def due(self, step: int) -> bool:
        """Whether this step, by the number of steps before it, is reported."""
        return self.every > 0 and (step + 1) % self.every == 0

    def report(self, step: int, spans: list[Span]) -> None:
        """Report a step, in unix time."""
        now = time.time() - time.perf_counter()
        rows = [[s.action.kind, s.action.stage, s.action.microbatch, now + s.begin, now + s.end] for s in spans]
        self.emit({"type": "timeline", "rank": self.rank, "step": step + 1, "spans": rows})


@dataclass
class Pipelined:
    """Microbatches through the stages of a pipeline in the order of its schedule.

    `width`: (positions, channels) of what stages exchange for each sample; `stream`: its type.
    """

    task: Task
    parallel: Parallel
    pipeline: Pipeline
    dtype: str
    stream: torch.dtype
    width: tuple[int, int]
    device: torch.device
    timeline: Timeline
    watch: Stopwatch

    def train(self, step: int, count: int, read: Read) -> Tensor:
        """As `Passes.train`."""
        sums = torch.zeros(count, 2, dtype=torch.float64, device=self.device)
        read = cache(read)
        stages = {stage: _Stage(self, stage, step, count, read, sums) for stage in self.parallel.modules}
        for module in self.parallel.modules.values():
            module.train()
        orders = self.pipeline.schedule.orders(count)
        settle = None
        if self.timeline.due(step) and self.device.type == "cuda":
            settle = partial(torch.cuda.synchronize, self.device)
        spans = self.pipeline.run(orders, stages, self._buffer(read), settle)
        if self.timeline.due(step):
            self.timeline.report(step, spans)
        with self.watch.on("communication"):
            self.parallel.finish()
        return sums

    def evaluate(self, count: int, read: Read) -> Tensor:
        """As `Passes.evaluate`."""
        sums = torch.zeros(count, 2, dtype=torch.float64, device=self.device)
        read = cache(read)
        stages = {stage: _Stage(self, stage, 0, count, read, sums) for stage in self.parallel.modules}
        for module in self.parallel.modules.values():
            module.eval()
        with torch.no_grad():
            self.pipeline.run(self.pipeline.schedule.forward_orders(count), stages, self._buffer(read))
        return sums

    def _buffer(self, read: Read) -> Callable[[], Tensor]:
        shape = (len(read(0).samples), *self.width)
        return partial(torch.empty, shape, dtype=self.stream, device=self.device)


class _Stage:
    """One stage of this rank during one step."""

    def __init__(self, passes: Pipelined, stage: int, step: int, count: int, read: Read, sums: Tensor):
        self._passes, self._number, self._step, self._read, self._sums = passes, stage, step, read, sums
        self._module: nn.Module = passes.parallel.modules[stage]
        self._is_last = stage == passes.pipeline.schedule.stages - 1
        self._unfinished = count  # microbatches whose backward pass is to come
        self._made: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._aside: dict[int, list[Later]] = {}
        self._incomplete = count  # microbatches whose gradients of weights are to come

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """As `pipeline.Stage.forward`."""
        batch: Batch = self._read(microbatch)
        passes = self._passes
        if x is not None:
            x.requires_grad_(torch.is_grad_enabled())
        with passes.watch.on("forward"), autocast(passes.dtype, passes.device):
            inputs = batch.inputs if x is None else x
            output = passes.task.forward(self._module, inputs, self._step, batch)
            if self._is_last:
                loss = passes.task.loss(output, batch.targets)
                note(self._sums[microbatch], loss, batch)
                output = loss * 0.0 if batch.spare else loss
        if torch.is_grad_enabled():
            self._made[microbatch] = (x, output)
        return None if self._is_last else output.detach().to(passes.stream)

    def backward(self, microbatch: int, gradient: Tensor | None, *, split: bool) -> Tensor | None:
        """As `pipeline.Stage.backward`."""
        x, output = self._made.pop(microbatch)
        self._unfinished -= 1
        data, last = self._passes.parallel.data, self._unfinished == 0
        watched = self._passes.watch.on("backward")
        with watched, data.backward(self._number, microbatch, last=last, split=split):
            torch.autograd.backward(output, None if gradient is None else gradient.to(output.dtype))
        if split:
            self._aside[microbatch] = self._passes.parallel.deferral.take()
        return None if x is None else x.grad

    def weights(self, microbatch: int) -> None:
        """As `pipeline.Stage.weights`."""
        with self._passes.watch.on("backward"):
            for later in self._aside.pop(microbatch):
                later()
        self._incomplete -= 1
        self._passes.parallel.data.weights_done(self._number, last=self._incomplete == 0)
