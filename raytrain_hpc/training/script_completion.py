"""Completion of the steps of a script: commit, checkpoint, evaluation, and the hooks of callbacks around them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import ModelError, RaytrainError
from raytrain_hpc.observability.metrics import METRIC_KEYS
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.torch_device import get_peak_memory_gib
from raytrain_hpc.training.callback_list import CallbackList, CallbackRequests
from raytrain_hpc.training.callback_state import CallbackState, PendingRequests
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.script_backward import ScriptBackward, StepTotals
from raytrain_hpc.training.script_random import ScriptGenerators
from raytrain_hpc.training.script_state import ScriptState
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.step_completion import TrainOutcome
from raytrain_hpc.training.timers import StepTimer
from raytrain_hpc.training.weight_exchange import WeightExchange


class ScriptProgress:
    """Part of the state of a script: rows trained on, and the step whose checkpoint is requested, if any.

    A recovery to that step saves it.
    """

    def __init__(self) -> None:
        self.num_rows, self.requested_step = 0, 0

    def state_dict(self) -> dict[str, int]:
        """Return the values."""
        return {"num_rows": self.num_rows, "requested_step": self.requested_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the values."""
        self.num_rows, self.requested_step = state["num_rows"], state["requested_step"]


@dataclass
class ScriptCompletion:
    """Executor of what follows the passes of a step. `begin` once, then `commit` after every step."""

    spec: WorkerSpec
    context: ParallelContext
    backward: ScriptBackward
    script_state: ScriptState
    generators: ScriptGenerators
    snapshots: SnapshotManager
    checkpointer: Checkpointer
    callbacks: CallbackList
    callback_state: CallbackState
    exchange: WeightExchange
    progress: ScriptProgress
    control: ControlChannel
    timer: StepTimer = field(default_factory=StepTimer)

    def __post_init__(self) -> None:
        self._logged: dict[str, float] = {}  # metrics of the script in this step
        self._is_updated = False  # whether an optimizer has changed the weights since the last commit
        self._is_save_requested = False  # by the script, on this rank
        self._step = self.spec.start_step  # committed steps
        self._last_record, self._is_pending = self.spec.start_metrics, False  # pending: not reported yet
        self._carried = CallbackRequests()  # of an evaluation in this step

    def begin(self) -> TrainOutcome | None:
        """Do what an interruption of the start step left undone. Return "done" if a callback has ended training."""
        step = self.spec.start_step
        self.checkpointer.remove_leftovers()
        self.callbacks.context.step = step
        self.callbacks.run("pre_train")
        requests = self.callbacks.agree_requests().union(self.callback_state.get_outstanding_requests(step))
        is_requested = requests.save or requests.stop or self.progress.requested_step == step > 0
        if self.spec.has_pending_checkpoint or (self.spec.is_start_unpublished and is_requested):
            self._save(step, requests, publish=True)
        self.timer = StepTimer()
        return "done" if requests.stop else None

    def request_save(self) -> None:
        """Request a checkpoint of the current step. A request of any rank counts."""
        self._is_save_requested = True

    def before_update(self) -> None:
        """Call before each step of an optimizer."""
        self.snapshots.before_update()
        if not self._is_updated:
            self._is_updated = True
            self.callbacks.run("pre_optim_step")

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the record of this step. Raises ModelError for a key that the run writes itself."""
        if reserved := [key for key in metrics if key in METRIC_KEYS and not key.startswith("val/")]:
            raise ModelError(f"log: {reserved[0]} is written by the run itself; choose another key")
        self._logged |= {str(key): float(value) for key, value in metrics.items()}

    def commit(self, step: int) -> TrainOutcome | None:
        """Commit a step. Return the outcome if a request ends training after it; "done": that of a callback."""
        totals = self.backward.totals or StepTotals()
        self.progress.num_rows += self._num_step_rows
        record = self._build_metrics(step, totals.loss) | self._logged
        self.callbacks.context.step = step
        self.callbacks.run("post_step", record)
        self.generators.capture()
        is_end, paused = step == self.spec.end_step, totals.pause
        if self._is_save_requested:
            self.callbacks.control.save()
        requests, is_agreed = self._carried.union(self.callbacks.get_own_requests()), False
        try:
            self.generators.sync()
            requests, is_agreed = self._carried.union(self.callbacks.agree_requests(always=True)), True
            is_end = is_end or requests.stop
            paused = paused and not is_end
        finally:  # also if another rank has failed: this one has finished the step
            self.progress.requested_step = step if requests.save else 0
            self.callback_state.capture(PendingRequests(step, requests, is_agreed))
            self.script_state.capture()
            self.snapshots.after_step(step, before_pause=paused)
            self.control.record_commit(record)
        stopped = totals.stop and not is_end
        self.callbacks.run("post_commit", record)
        publish = totals.save or is_end or stopped or requests.save
        if self.checkpointer.should_save(step) or publish:
            with self.timer.exclude():
                record["time/checkpoint_s"] = self._save(step, requests, publish=publish)
        self._logged, self._carried, self._is_updated, self._is_save_requested = {}, CallbackRequests(), False, False
        self._step, self._last_record, self._is_pending = step, record, True
        if is_end or stopped or paused:
            self.report()
        return "done" if requests.stop else "stopped" if stopped else "paused" if paused else None

    @contextmanager
    def report_on_error(self) -> Iterator[None]:
        """Report the last committed step if an error ends the run: no other generation will."""
        try:
            yield
        except RaytrainError:
            self.report()
            raise

    def report(self) -> None:
        """Hand the record of the last committed step to the driver.

        Call when it can no longer be evaluated, and when all ranks have the state of that step.
        """
        if self._is_pending and self._last_record is not None and self.context.rank == 0:
            self.control.emit({"type": "step", "metrics": self._last_record})
        self._is_pending = False

    @contextmanager
    def evaluation(self) -> Iterator[dict[str, float]]:
        """Call the hooks around an evaluation; yield the dict that takes its metrics.

        Before an update, the evaluation is that of the last committed step: its record is completed, and a checkpoint
        that a callback requests is saved now. After an update, it is that of the step that is not committed yet.
        """
        callbacks, metrics = self.callbacks, dict[str, float]()
        callbacks.context.step = self._step + self._is_updated
        self.control.set_phase("evaluating")
        with self.timer.exclude():
            try:
                callbacks.run("pre_eval")
                yield metrics
                self._finish_evaluation(metrics)
            finally:
                self.exchange.undo()
                callbacks.context.step = self._step

    def _finish_evaluation(self, metrics: dict[str, float]) -> None:
        callbacks, record = self.callbacks, None if self._is_updated else self._last_record
        of_training = {key: value for key, value in (record or {}).items() if not key.startswith("val/")}
        seen = {"step": callbacks.context.step, **of_training, **metrics}
        callbacks.run("post_eval", seen)
        metrics |= {key: value for key, value in seen.items() if key != "step" and key not in of_training}
        self.exchange.undo()
        requests = callbacks.agree_requests()
        if requests.save and not self._is_updated:
            self._save(self._step, requests, publish=True)
            self.control.set_phase("evaluating")
            requests = CallbackRequests(stop=requests.stop)
        self._carried = self._carried.union(requests)
        if record is not None:
            record |= metrics
            self.control.amend_metrics(record)
            if not self._is_pending:  # of an earlier generation, or of the last step
                self._is_pending = True
                self.report()
        elif self._is_updated or self._step:
            self._logged |= metrics
        elif self.context.rank == 0:  # metrics.jsonl has no line for the initial weights
            losses = ", ".join(f"{key} {value:.4f}" for key, value in metrics.items())
            self.control.emit({"type": "note", "text": f"step 0: {losses}"})

    @property
    def _num_step_rows(self) -> int:
        """Rows of all batches of the step; 1 if a single rank has taken none by `local_batch`."""
        return self.backward.batches.num_rows or 1

    def _save(self, step: int, requests: CallbackRequests, *, publish: bool) -> float:
        """Save the current state in the background, unless it is saved. Return the seconds waited."""
        if self.checkpointer.has_saved(step):
            if publish:
                self.checkpointer.publish(step)
            self.checkpointer.label(step, requests.labels)
            return 0.0
        self.callbacks.run("pre_checkpoint_saved")
        self.control.set_phase("saving")
        waited_s = self.checkpointer.save(step, publish=publish or bool(requests.labels))
        self.checkpointer.label(step, requests.labels)
        self.callbacks.run("post_checkpoint_saved")
        return waited_s

    def _build_metrics(self, step: int, loss: float) -> Record:
        world_size, seconds = self.context.layout.world_size, self.timer.end_step()
        return {
            "step": step,
            "train/loss": loss,
            "train/lr": self.script_state.lr,
            "train/grad_norm": self.backward.grad_norm,
            "train/tokens": self.progress.num_rows,
            "throughput/tokens_per_sec": self._num_step_rows / seconds,
            "throughput/tokens_per_sec_per_device": self._num_step_rows / seconds / world_size,
            "time/unix": time.time(),
            "time/step_s": seconds,
            "time/data_s": 0.0,
            "time/checkpoint_s": 0.0,
            "memory/peak_gib": get_peak_memory_gib(self.context.device),
            "elastic/world_size": world_size,
            "elastic/generation": self.spec.generation,
        }
