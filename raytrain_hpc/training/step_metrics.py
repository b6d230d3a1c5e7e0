"""Metrics of a committed step, as one record for metrics.jsonl and TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from raytrain_hpc.config.schema import Config
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.torch_device import get_peak_memory_gib
from raytrain_hpc.training.loss_reduction import StepRequests, StepTotals
from raytrain_hpc.training.timers import PhaseTimer


@dataclass
class StepResult:
    """Outcome of one forward and backward pass over the global batch; the same on every rank except for `data_s`.

    `loss` is the mean per valid token, `grad_norm` the norm before clipping. `requests`: what any rank
    asks for after this step. `data_s`: seconds this rank waited for data. `totals`: on the device.
    """

    loss: float
    grad_norm: float
    requests: StepRequests
    data_s: float
    totals: StepTotals


@dataclass
class StepMetrics:
    """Builder of the record of a step. `emit` hands it to the driver on rank 0, and does nothing on other ranks.

    `state_memory`: GiB of weights and optimizer moments on this rank, by metric key. `defers`: whether a record is held
    back until `report_step`. For state that is partitioned: a rank may end a step, and be lost, while another one still
    computes its part of it, so that the step has to be run again.
    """

    config: Config
    context: ParallelContext
    generation: int
    state_memory: dict[str, float]
    timers: PhaseTimer
    emit: Callable[[Record], None]
    defers: bool = False

    def __post_init__(self) -> None:
        self._deferred: Record | None = None

    def build(self, step: int, result: StepResult, lr: float, seconds: float, gradient_nbytes: int) -> Record:
        """Return the metrics of committed step `step` (1-based), which took `seconds`; resets the phase timers."""
        train, world_size = self.config.train, self.context.layout.world_size
        tokens_per_s = train.global_batch_size * train.seq_len / seconds
        return {
            "step": step,
            "train/loss": result.loss,
            "train/lr": lr,
            "train/grad_norm": result.grad_norm,
            "train/tokens": step * train.global_batch_size * train.seq_len,
            "throughput/tokens_per_sec": tokens_per_s,
            "throughput/tokens_per_sec_per_device": tokens_per_s / world_size,
            "time/unix": time.time(),
            "time/step_s": seconds,
            "time/data_s": result.data_s,
            **{f"time/{phase}_s": phase_s for phase, phase_s in self.timers.read_and_reset().items()},
            "time/checkpoint_s": 0.0,
            "memory/peak_gib": get_peak_memory_gib(self.context.device),
            **self.state_memory,
            "memory/gradients_gib": gradient_nbytes / 2**30,
            "elastic/world_size": world_size,
            "elastic/generation": self.generation,
        }

    def emit_step(self, record: Record) -> None:
        """Hand the finished record of a step to the driver, or hold it back until `report_step`.

        Before the first step there are validation losses only. They are printed: metrics.jsonl has a line per step.
        """
        if "train/loss" in record:
            self._deferred = record
            if not self.defers:
                self.report_step()
            return
        losses = ", ".join(f"{key} {value:.4f}" for key, value in record.items() if key.startswith("val/"))
        self.emit({"type": "note", "text": f"step {record['step']}: {losses}"})

    def report_step(self) -> None:
        """Hand over the record that is held back, if any. Call when all ranks have the state of the last step."""
        if self._deferred is not None:
            self.emit({"type": "step", "metrics": self._deferred})
            self._deferred = None
