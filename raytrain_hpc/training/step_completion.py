"""Completion of a committed step: its checkpoint and its evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from raytrain_hpc.errors import RunFailedError
from raytrain_hpc.optim.optimizer import Optimizer
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.training.callback_list import CallbackList, CallbackRequests
from raytrain_hpc.training.callback_state import CallbackState, PendingRequests
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.evaluator import Evaluator

# done: `end_step` is reached, or a callback has ended training; stopped: ended on request, after a checkpoint was
# written or its storage error reported; paused: ended on request, and saved only if a checkpoint was due. Another
# generation can follow the last two.
TrainOutcome = Literal["done", "stopped", "paused"]


@dataclass
class StepCompletion:
    """Checkpoint and evaluation of the step that `callbacks.context.step` counts, with the hooks around them."""

    callbacks: CallbackList
    callback_state: CallbackState
    checkpointer: Checkpointer
    evaluator: Evaluator | None  # None: the dataset has no validation split
    optimizer: Optimizer
    control: ControlChannel
    undo_weight_exchange: Callable[[], None]  # if a callback has left the weights exchanged

    def add_last_evaluation(self, requests: CallbackRequests) -> CallbackRequests:
        """Return the requests, with an evaluation if a callback ends training and there is a validation split."""
        return replace(requests, evaluate=True) if requests.stop and self.evaluator is not None else requests

    def save_and_evaluate(
        self, record: Record, *, save: bool, publish: bool, evaluate: bool, labels: tuple[str, ...]
    ) -> TrainOutcome | None:
        """Save the step, evaluate it into its metrics, and save it then if there is a reason to.

        A checkpoint that is due is written before the evaluation, which can take long. `publish`: see
        `Checkpointer.save`. Returns "stopped" if a stop was requested before the end of the evaluation, "done" if a
        callback ends training after it, else None.
        """
        if save:
            record["time/checkpoint_s"] = self._save(labels, publish=publish)
        if not evaluate:
            return None
        known, step = set(record), self.callbacks.context.step
        is_complete = self._evaluate(record)
        added = {key: value for key, value in record.items() if key not in known or key.startswith("val/")}
        pending = PendingRequests(
            step,
            replace(self.callbacks.get_own_requests(), evaluate=not is_complete),
            is_agreed=False,
            num_evaluations=self.callback_state.pending.count_evaluations(step) + 1,
            eval_metrics=added if is_complete else {},
        )
        self.callback_state.capture(pending)  # at once: it belongs to what callbacks have just changed
        requests = self.callbacks.agree_requests()
        pending = replace(pending, requests=replace(requests, evaluate=not is_complete), is_agreed=True)
        self.callback_state.capture(pending)
        is_requested = requests.save or requests.stop or not is_complete
        if is_requested and not save:
            self.callbacks.run("pre_checkpoint_saved")
            record["time/checkpoint_s"] = self._save(requests.labels, publish=True)
        else:
            if is_requested:
                self.checkpointer.publish(step)
            self.checkpointer.label(step, requests.labels)
        return "done" if requests.stop else None if is_complete else "stopped"

    def _evaluate(self, record: Record) -> bool:
        """Add the validation losses to a step's metrics unless it has them. Return False if a stop was requested.

        The metrics then lack `val/loss`, by which the driver finds the evaluation pending. A pause does not interrupt.
        Raises RunFailedError if there is no validation split.
        """
        self.callbacks.run("pre_eval")
        if "val/loss" not in record:
            if self.evaluator is None:
                raise RunFailedError("an evaluation is due, but the dataset has no validation split")
            record |= self.evaluator.evaluate() or {}
        self.callbacks.run("post_eval", record)
        self.undo_weight_exchange()
        return "val/loss" in record

    def _save(self, labels: tuple[str, ...], *, publish: bool) -> float:
        """Save the current state, in the background unless `checkpoint.async=false`. Return the seconds waited.

        Waits for an earlier write first. A storage error is reported to the driver, not raised.
        """
        self.control.set_phase("saving")
        step = self.callbacks.context.step
        waited_s = self.checkpointer.save(step, publish=publish or bool(labels))
        self.checkpointer.label(step, labels)
        self.optimizer.release_memory()  # the copy has read the moments
        self.callbacks.run("post_checkpoint_saved")
        return waited_s
