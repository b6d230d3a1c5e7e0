"""Backward passes of a script's losses: gradients of the mean over a global batch, summed over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from raytrain_hpc.distributed.process_groups import GenerationAbortedError, ParallelContext
from raytrain_hpc.errors import ModelError, RunFailedError
from raytrain_hpc.parallel.pairwise_sum import sum_pairwise
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.training.callback_list import CallbackList
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.loss_reduction import all_reduce
from raytrain_hpc.training.script_batches import MicrobatchRows, ScriptBatches
from raytrain_hpc.training.script_models import ScriptModels
from raytrain_hpc.training.script_random import ScriptGenerators
from raytrain_hpc.training.snapshot_manager import SnapshotManager


@dataclass
class StepTotals:
    """Loss of a step, summed over its passes, and the requests of all ranks."""

    loss: float = 0.0
    stop: bool = False
    pause: bool = False
    save: bool = False


class ScriptLoss:
    """Identity applied to the losses of a script, so that injected faults can replace it."""

    def loss(self, output: Tensor, batch: None) -> tuple[Tensor, int]:
        """Return the loss and a count."""
        return output, 1


@dataclass
class _Pass:
    """Passes over the microbatches of a batch. `losses`: weighted, by microbatch of all ranks, fp64."""

    losses: Tensor
    microbatch: MicrobatchRows
    number: int = 0  # of the microbatch among those of this rank
    is_last: bool = False
    has_started: bool = False
    has_backward: bool = False  # of the current microbatch


@dataclass
class ScriptBackward:
    """Executor of backward passes. `totals`: of the current step, None before its first pass is complete."""

    context: ParallelContext
    models: ScriptModels
    batches: ScriptBatches
    generators: ScriptGenerators
    callbacks: CallbackList
    snapshots: SnapshotManager
    checkpointer: Checkpointer
    control: ControlChannel
    script_loss: ScriptLoss
    is_elastic: bool

    def __post_init__(self) -> None:
        self.totals: StepTotals | None = None
        self.grad_norm = 0.0
        self._step = -1  # outside of the steps
        self._pass: _Pass | None = None
        self._num_passes = 0
        self._is_incomplete = False

    def check_complete(self) -> None:
        """Raise ModelError if a loop over microbatches of this step was left before its end."""
        if self._is_incomplete and self._pass is None:
            raise ModelError(
                f"step {self._step}: the loop over run.microbatches was left before its end; the gradients of other "
                "ranks are missing"
            )

    def begin_step(self, step: int) -> None:
        """Begin a step, the one that follows `step` committed ones."""
        self.totals, self._step, self._pass, self._num_passes, self._is_incomplete = None, step, None, 0, False
        self.batches.begin_step()

    def run(self, loss: Tensor) -> Tensor:
        """Compute gradients of a loss of this rank's rows, or of the current microbatch.

        Returns the mean loss over the rows of all ranks; for a microbatch, its own. Call in a step. Collective. Raises
        ModelError if the weight of the loss is unknown, and for a second loss of a microbatch.
        """
        if self._pass is not None:
            return self._run_microbatch(self._pass, loss)
        self.check_complete()
        if self.is_elastic:
            raise ModelError(
                f"step {self._step}: train.deterministic=elastic adds gradients in the order of microbatches; call "
                "backward inside of `for microbatch in run.microbatches(batch)`"
            )
        weighted_loss = self._weigh(loss, self.batches.use_rows(self._step))
        total = self._begin_pass(float(weighted_loss.detach()))
        with self.models.backward_context(0, is_last=True):
            weighted_loss.backward()  # type: ignore[no-untyped-call]
        self._end_pass(total)
        return weighted_loss.new_tensor(total).detach()

    def iter_microbatches(self, num_local_rows: int) -> Iterator[slice]:
        """Yield the rows of each microbatch of this rank's rows; then complete the gradients. Collective.

        Raises ModelError if `run` is not called once for each.
        """
        self.check_complete()
        microbatches = self.batches.split_rows(num_local_rows, self._step)
        losses = torch.zeros(microbatches[0].count, dtype=torch.float64, device=self.context.device)
        self._pass = current = _Pass(losses, microbatches[0])
        self._is_incomplete = True
        self._num_passes += 1
        try:
            with self.generators.isolate_microbatches() as seed_microbatch:
                for number, microbatch in enumerate(microbatches):
                    current.microbatch, current.number, current.has_backward = microbatch, number, False
                    current.is_last = number == len(microbatches) - 1
                    # Padding never counts, whatever it draws.
                    seed_microbatch(self._step, self._num_passes, microbatch.index or 0)
                    self.models.running_statistics.pre_microbatch()
                    yield microbatch.rows
                    if not current.has_backward:
                        raise ModelError(f"step {self._step}: run.backward was not called for a microbatch")
            all_reduce(losses, self.context)
            self._end_pass(float(sum_pairwise(losses)))
            self._is_incomplete = False
        finally:
            self._pass = None
            self.control.set_phase("evaluating")  # code outside of the passes may take minutes

    def _run_microbatch(self, current: _Pass, loss: Tensor) -> Tensor:
        microbatch = current.microbatch
        if current.has_backward:
            raise ModelError(
                f"step {self._step}: run.backward was called twice for a microbatch; add the losses, or loop over "
                "run.microbatches again"
            )
        weighted_loss = self._weigh(loss, microbatch.weight)
        if not current.has_started:
            self._begin_pass(0.0)
        if microbatch.index is not None:
            current.losses[microbatch.index] = weighted_loss.detach()
        with self.models.backward_context(current.number, is_last=current.is_last):
            weighted_loss.backward()  # type: ignore[no-untyped-call]
        self.models.running_statistics.post_microbatch(current.number)
        current.has_started = current.has_backward = True
        return loss.detach()

    def _weigh(self, loss: Tensor, weight: float) -> Tensor:
        if self.totals is None and (self._pass is None or not self._pass.has_started):
            self.callbacks.context.step = self._step
            self.callbacks.run("pre_step")
        return self.script_loss.loss(loss, None)[0] * weight

    def _begin_pass(self, loss: float) -> float:
        """Wait for all ranks, agree on their requests, and return the sum of `loss`. Stalls are timed from here on."""
        self.snapshots.wait_for_copies()
        control, save = self.control, self.checkpointer.is_time_due()
        requests = (float(control.stop_requested), float(control.pause_requested), float(save))
        sums = torch.tensor([loss, *requests], dtype=torch.float64, device=self.context.device)
        all_reduce(sums, self.context)
        total, *flags = sums.tolist()
        self._requests = [flag > 0 for flag in flags]
        self.control.set_phase("training")
        self.models.begin_gradient_sync()
        return float(total)

    def _end_pass(self, loss: float) -> None:
        """Complete the gradients and add the loss of a pass to that of the step. Raises RunFailedError for NaN."""
        self.models.finish_gradient_sync()
        if self.totals is None:
            self.callbacks.run("post_forward_backward")
        self.models.running_statistics.sync()
        self.checkpointer.wait_for_staging()
        if self.control.is_aborted:
            raise GenerationAbortedError("collectives were aborted")
        self.grad_norm = float(self.models.compute_grad_norm())
        self.control.set_phase("evaluating")
        earlier = 0.0 if self.totals is None else self.totals.loss
        self.totals = StepTotals(earlier + loss, *self._requests)
        if not isfinite(self.totals.loss):
            raise RunFailedError(
                f"step {self._step + 1}: the loss is {self.totals.loss}; a step of a script cannot be recomputed"
            )
