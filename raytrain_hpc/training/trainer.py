"""The training loop of one rank: a step, and what follows a committed step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from raytrain_hpc.config.schema import Config
from raytrain_hpc.distributed.process_groups import GenerationAbortedError
from raytrain_hpc.elastic.watchdog import Phase
from raytrain_hpc.errors import RaytrainError
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.training.callback_list import CallbackList, CallbackRequests
from raytrain_hpc.training.callback_state import CallbackState, PendingRequests
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.data_builder import Loader
from raytrain_hpc.training.forward_backward import ForwardBackward
from raytrain_hpc.training.loss_reduction import LossReducer, StepRequests, StepTotals
from raytrain_hpc.training.model_update import ModelUpdate
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.spare_samples import StateDistrustedError
from raytrain_hpc.training.step_audits import StepAudits
from raytrain_hpc.training.step_completion import StepCompletion, TrainOutcome
from raytrain_hpc.training.step_guard import StepGuard
from raytrain_hpc.training.step_metrics import StepMetrics, StepResult
from raytrain_hpc.training.timers import PhaseTimer, StepTimer
from raytrain_hpc.training.train_module import AnyBatch

# (step, slot) -> microbatch of this rank; a slot past its microbatches gives a padding one.
ReadMicrobatch = Callable[[int, int], AnyBatch]


@dataclass(frozen=True)
class PendingWork:
    """Work of the start step that an earlier generation or process did not finish, to be done before the first step.

    `eval_metrics`: metrics of that step, if its evaluation was due and they lack a validation loss. `checkpoint`: its
    checkpoint was due and has not been published; only if the state is not from run.dir. `start_metrics`: metrics of
    that step, if known, for work that callbacks requested. `is_unpublished`: the state is not from run.dir.
    `checks_determinism`: there is time to compute a microbatch twice, since this is no recovery from memory.
    """

    eval_metrics: Record | None = None
    checkpoint: bool = False
    start_metrics: Record | None = None
    is_unpublished: bool = False
    checks_determinism: bool = False


@dataclass
class Trainer:
    """One rank of one generation. `training/builder.py` builds it; `run` trains.

    Steps are counted by committed steps: `train_step(step)` runs the step that follows `step` committed ones. A step is
    committed on a rank when it is finished there, applied or rejected; other ranks can be one step behind.
    """

    config: Config
    loader: Loader
    model_step: ForwardBackward  # forward and backward passes over this rank's microbatches
    loss_reducer: LossReducer
    model_update: ModelUpdate  # gradient clipping, optimizer, buffers
    step_guard: StepGuard  # rejects steps with a loss or norm that is not finite, and loss spikes
    snapshots: SnapshotManager
    checkpointer: Checkpointer
    callbacks: CallbackList  # everything optional: evaluation schedule, replica check, profiler, those of the user
    callback_state: CallbackState
    completion: StepCompletion  # checkpoint and evaluation of a committed step
    metrics: StepMetrics
    timers: PhaseTimer
    control: ControlChannel
    pending: PendingWork = field(default_factory=PendingWork)
    audits: StepAudits | None = None  # None: no step is audited

    def __post_init__(self) -> None:
        # The first step of a generation may compile: the watchdog allows phase "building" more time.
        self._compute_phase: Phase = "building" if self.config.train.compile is True else "training"

    def run(self, start_step: int, end_step: int) -> TrainOutcome:
        """Train from `start_step` committed steps to `end_step`, and save a checkpoint at the end or on a stop.

        A pause saves only if `checkpoint.interval` is due: the state stays in memory for the next generation. Raises
        what `train_step` raises, and ReplicaMismatchError if replicas differ.
        """
        with self.callbacks.close_on_exit():
            with self.loader.prefetch(start_step, end_step), self.snapshots.close_on_exit():
                try:
                    outcome = self._train_loop(start_step, end_step)
                except RaytrainError:  # it ends the run: no other generation will report the last step
                    self.metrics.report_step()
                    raise
                self.control.set_phase("saving")  # copies and writes may take longer than a training step
            self.checkpointer.finish()
        return outcome

    def _train_loop(self, start_step: int, end_step: int) -> TrainOutcome:
        step, outcome = start_step, self._begin(start_step)
        timer = StepTimer()
        while step < end_step and outcome is None:
            result = self.train_step(step)
            step += 1
            outcome = self._after_step(step, end_step, result, timer)
        self.metrics.report_step()
        return outcome or "done"

    def train_step(self, step: int) -> StepResult:
        """Run one optimizer step. The update is applied only after loss and gradient norm were checked on all ranks.

        If the loss or gradient norm is bad, the step is recomputed once. If it is still bad, `fault.on_nan` applies:
        the run ends with RunFailedError, the update is skipped, or the state is rolled back. A skipped or rolled-back
        step still counts as committed: the next call trains on the next batch. Raises GenerationAbortedError if the
        collectives of this rank were aborted meanwhile; a collective that fails by itself raises its own error.
        """
        result = self.forward_backward(step, self.loader.read)
        if self.step_guard.check(result.loss, result.grad_norm) is not None:
            result, accepted = self.retry_step(step, result)
            if not accepted:
                self.raise_if_aborted()
                return result
        self.model_update.sync_buffers()
        self.callbacks.run("pre_optim_step")
        with self.timers.phase("optimizer"):
            if self.audits is not None and self.audits.is_due(step):
                self.control.set_phase("saving")  # under ZeRO, state is copied to other ranks
                self.audits.verify_update(step, self.model_update.learning_rate(step))
                self.control.set_phase(self._compute_phase)
            self.raise_if_aborted()  # while the state of the last step can still be recovered
            self.snapshots.before_update()
            self.model_update.update_weights(step)
        self.step_guard.accept(step, result.loss)
        if self.model_update.optimizer.matrix_names:  # other updates communicate nothing, and are right
            self.raise_if_aborted()
        return result

    def forward_backward(self, step: int, read_microbatch: ReadMicrobatch) -> StepResult:
        """Compute the gradients of the mean loss of the global batch, clip them, and leave them on the parameters.

        Raises GenerationAbortedError if collectives were aborted meanwhile: the results are then meaningless.
        """
        reader = _TimedReader(step, read_microbatch, self.control, self._compute_phase)
        self.callbacks.run("pre_step")
        losses = self._run_passes(step, reader)
        self.callbacks.run("post_forward_backward")
        self.wait_for_background_copies()
        with self.timers.phase("communication"):
            totals = self._reduce_losses(step, losses)
            grad_norm = self._clip_gradients(step, totals.num_tokens)
        if grad_norm is None:
            self.model_update.optimizer.zero_grad()
            return self.forward_backward(step, self.loader.reread)
        loss, norm, requests = totals.read(grad_norm, allow_empty=self.config.fault.on_nan != "stop")
        self.raise_if_aborted()
        self.metrics.report_step()  # all ranks have passed `wait_for_background_copies`
        if requests.distrust:
            raise StateDistrustedError(step)
        return StepResult(loss, norm, requests, reader.seconds, totals)

    def _run_passes(self, step: int, reader: _TimedReader) -> Tensor:
        """Run the forward and backward passes of a step, audited if that is due, and return `ForwardBackward.train`."""

        def train(again: bool) -> Tensor:
            own = replace(reader, read_microbatch=self.loader.reread) if again else reader
            return self.model_step.train(step, self.loss_reducer.num_local_microbatches, own.read)

        if self.audits is None:
            return train(False)
        other = replace(reader, read_microbatch=self.loader.read_microbatch)
        if not self.audits.is_due(step):
            return self.audits.run_other_passes(step, train, lambda step, microbatch: other.read(microbatch))
        self.control.set_phase("saving")  # all state is read
        return self.audits.run_passes(step, train, lambda step, microbatch: other.read(microbatch))

    def _reduce_losses(self, step: int, losses: Tensor) -> StepTotals:
        """Sum losses and requests over all ranks, verified in a step that is audited."""
        reduce = partial(self.reduce_losses_and_requests, losses)
        if self.audits is None or not self.audits.is_due(step):
            return reduce()
        return self.audits.reduce_losses(step, reduce, partial(self.loss_reducer.is_right, losses))

    def _clip_gradients(self, step: int, num_tokens: Tensor) -> Tensor | None:
        """Clip the gradients and return their norm, or None if memory errors have spoilt those of an audited step."""
        update, audits = self.model_update, self.audits
        compute_norm = partial(update.compute_norm, num_tokens)
        if audits is None or not audits.is_due(step):
            norm, scale = compute_norm()
            update.scale_gradients(scale)
            return norm
        self.control.set_phase("saving")  # state is read, and under ZeRO gradients are copied to other ranks
        if audits.have_gradients_changed(step):
            return None
        norm, scale = audits.compute_norm(step, compute_norm)
        self.control.set_phase(self._compute_phase)
        update.scale_gradients(scale)
        return None if audits.have_clipped_gradients_changed(step) else norm

    def wait_for_background_copies(self) -> None:
        """Wait for snapshots and checkpoint staging, which read the live state, and for copies of snapshots to peers.

        Call after the backward passes and before the all-reduce of losses. A rank that passes that all-reduce then
        knows that all earlier snapshots are complete on all ranks.
        """
        self.control.set_phase("saving")
        self.snapshots.wait_for_copies()
        self.checkpointer.wait_for_staging()
        self.control.set_phase(self._compute_phase)

    def reduce_losses_and_requests(self, losses: Tensor) -> StepTotals:
        """Sum losses, token counts, and requests to stop or pause over all ranks, in one all-reduce."""
        control = self.control
        requests = StepRequests(
            control.stop_requested,
            control.pause_requested,
            self.checkpointer.is_time_due(),
            control.distrust_requested,
        )
        return self.loss_reducer.reduce(losses, requests)

    def retry_step(self, step: int, first_result: StepResult) -> tuple[StepResult, bool]:
        """Recompute a step with a bad loss or norm once, to rule out a transient hardware error.

        A global batch without targets has no loss, and is a bad step too. Returns the new result, and whether it is
        good. If it is not, the step guard has carried out `fault.on_nan`: the update is skipped or the state rolled
        back. Raises RunFailedError if `fault.on_nan=stop`, after more than `fault.max_failures` bad steps in a row, or
        if there is no checkpoint to roll back to.
        """
        loss_and_norm = (first_result.loss, first_result.grad_norm)
        incident = self.step_guard.build_incident(step, loss_and_norm, first_result.totals)
        self.model_update.undo_passes()
        result = self.forward_backward(step, self.loader.reread)
        if self.step_guard.check(result.loss, result.grad_norm) is None:
            self.step_guard.report_incident(incident, "gone when recomputed", 0)
            return result, True
        self.model_update.undo_passes()
        self.snapshots.before_update()
        self.control.set_phase("saving")
        steps_undone = self.step_guard.reject(step, result.loss, result.grad_norm)
        rollback = f"; state rolled back to step {step - steps_undone}" if steps_undone else ""
        self.step_guard.report_incident(incident, f"bad again when recomputed{rollback}", steps_undone)
        return result, False

    def raise_if_aborted(self) -> None:
        """Raise GenerationAbortedError if collectives were aborted: an aborted one can return without an error."""
        if self.control.is_aborted:
            raise GenerationAbortedError("its collectives were aborted")

    def _after_step(self, step: int, end_step: int, result: StepResult, timer: StepTimer) -> TrainOutcome | None:
        """Complete, snapshot, record, save, evaluate and report committed step `step`.

        Returns the outcome if training ends after it, else None. At the end a pause is ignored, and so is a stop unless
        there is a validation split: a stop requested by then prevents or ends the last evaluation. An evaluation due at
        a stop or pause stays pending.
        """
        callbacks = self.callbacks
        update = self.model_update
        record = self.metrics.build(
            step, result, update.learning_rate(step - 1), timer.end_step(), update.gradient_nbytes
        )
        if self.audits is not None and self.audits.is_due(step - 1):
            record["elastic/audited"] = int(self.audits.is_verified(step - 1))
        callbacks.context.step = step
        callbacks.run("post_step", record)
        requests = self.completion.add_last_evaluation(callbacks.get_own_requests())
        is_agreed, is_end, pause = False, step == end_step, result.requests.pause
        try:
            requests, is_agreed = self.completion.add_last_evaluation(callbacks.agree_requests()), True
            is_end = is_end or requests.stop
            pause = pause and not is_end
        finally:  # also if another rank has failed: this one has finished the step
            self.callback_state.capture(PendingRequests(step, requests, is_agreed))
            self.snapshots.after_step(step, before_pause=pause)
            self.control.record_commit(record)
        stop = result.requests.stop and not is_end
        publish = result.requests.save or requests.save or is_end or stop
        save = self.checkpointer.should_save(step) or publish
        callbacks.run("post_commit", record)
        self._compute_phase = "training"
        if save:
            callbacks.run("pre_checkpoint_saved")
        with timer.exclude():
            evaluate = requests.evaluate and not (stop or pause)
            outcome = self.completion.save_and_evaluate(
                record, save=save, publish=publish, evaluate=evaluate, labels=requests.labels
            )
        self.control.amend_metrics(record)
        self.metrics.emit_step(record)
        return "done" if is_end and outcome is None else "stopped" if stop else "paused" if pause else outcome

    def _begin(self, step: int) -> TrainOutcome | None:
        """Call `pre_train`, and do what an interruption after step `step` left undone. Return as `_after_step` does."""
        pending = self.pending
        if self.audits is not None and pending.checks_determinism:
            reader = _TimedReader(step, self.loader.read_microbatch, self.control, self._compute_phase)
            self.audits.check_determinism(step, lambda step, microbatch: reader.read(microbatch))
        self.checkpointer.remove_leftovers()
        self.callbacks.context.step = step
        self.callbacks.run("pre_train")
        requests = self.callbacks.agree_requests().union(self.callback_state.get_outstanding_requests(step))
        record = pending.eval_metrics or (pending.start_metrics or {"step": step} if requests.evaluate else None)
        known = self.callback_state.get_eval_metrics(step)
        if record is not None and known and not requests.evaluate:  # they were lost, and callbacks have seen them
            self.metrics.emit_step(record | known)
            record = None
        is_evaluated = record is None or "val/loss" in record
        save, evaluate = self._should_save_at_start(requests), record is not None
        if save:
            self.callbacks.run("pre_checkpoint_saved")
        outcome = self.completion.save_and_evaluate(
            record or {}, save=save, publish=True, evaluate=evaluate, labels=requests.labels
        )
        if record is not None and not is_evaluated and outcome != "stopped":
            self.metrics.emit_step(record)
        return "done" if requests.stop and outcome is None else outcome

    def _should_save_at_start(self, requests: CallbackRequests) -> bool:
        """Return whether a checkpoint of the start step is missing that was due, or that callbacks ask for."""
        return self.pending.checkpoint or (self.pending.is_unpublished and (requests.save or requests.stop))


@dataclass
class _TimedReader:
    """Reads this rank's microbatches of one step; `seconds` is the time spent waiting for data."""

    step: int
    read_microbatch: ReadMicrobatch
    control: ControlChannel
    compute_phase: Phase
    seconds: float = 0.0

    def read(self, slot: int) -> AnyBatch:
        """Read the microbatch of a slot, in phase "loading" for the watchdog."""
        began = time.perf_counter()
        self.control.set_phase("loading")
        batch = self.read_microbatch(self.step, slot)
        self.control.set_phase(self.compute_phase)
        self.seconds += time.perf_counter() - began
        return batch
