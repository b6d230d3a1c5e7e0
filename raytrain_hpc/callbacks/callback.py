"""Interface of callbacks: hooks on every rank (`Callback`) and in the driver (`DriverCallback`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.storage.location import parse_location
from raytrain_hpc.storage.working_copy import get_working_directory

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class ParameterState(dict[str, Any]):
    """Tensors of a callback's state, one per trainable parameter, laid out like `TrainingContext.parameters`.

    Return one from `state_dict` to have it sharded, saved and resharded like the weights.
    """


@dataclass
class TrainingContext:
    """Facts about this rank in this generation, and its model, as `self.context` of a callback.

    `step`: committed steps; in `post_step` and later hooks of a step, this step included. `modules`: the model, by
    pipeline stage; without a pipeline, stage 0 is the whole model. Its weights can be bf16 copies, current only during
    passes (`train.weight_copies`). `parameters`: this rank's slices of the trainable weights, by name; plain tensors,
    which must not be replaced.
    """

    config: Config
    rank: int
    world_size: int
    generation: int
    device: torch.device
    start_step: int
    end_step: int
    log: Callable[[str], None]
    """Print a line on the driver's console. Every rank that calls it prints one."""
    modules: Mapping[int, nn.Module] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    get_gradients: Callable[[], dict[str, Tensor]] = dict
    """Return this rank's slices of the gradients, by name. Parameters that the loss did not reach have none."""
    exchange_weights: Callable[[ParameterState], None] = lambda state: None
    """Exchange the contents of the weights with those of a ParameterState that is part of the state of a callback.

    Call it in `pre_eval`, and again in `post_eval`. A fault in between loses nothing.
    """
    step: int = 0

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, the one that should print and write files."""
        return self.rank == 0

    @property
    def run_dir(self) -> Path:
        """The run directory; if it is in an object store, a local directory whose files are uploaded to it."""
        return get_working_directory(parse_location(self.config.run.dir))


class TrainingControl:
    """Requests of callbacks to the training loop, as `self.control` of a callback.

    A request of any rank counts for all. It takes effect after the current step or evaluation, and after the hooks of
    that moment have been called on all ranks.
    """

    def __init__(self, *, can_evaluate: bool = True):
        self._can_evaluate = can_evaluate
        self.clear()

    def save(self, label: str = "") -> None:
        """Request a checkpoint of the current step, unless the step is saved anyway.

        `label`: the newest checkpoint with this label is kept, whatever `checkpoint.keep` says.
        """
        self.save_requested = True
        if label:
            self.labels.add(label)

    def evaluate(self) -> None:
        """Request an evaluation. Raises CallbackError if there is no validation split, and in a script.

        In `pre_train` of a new run, the initial weights are evaluated: the metrics of `post_eval` are then `step` and
        the losses, which are printed but are not in metrics.jsonl.
        """
        if not self._can_evaluate:
            raise CallbackError("control.evaluate: the run has no validation split; a script calls run.evaluate itself")
        self.evaluate_requested = True

    def stop(self) -> None:
        """Request the end of training: the run evaluates, saves a checkpoint and is done, as after its last step."""
        self.stop_requested = True

    def clear(self) -> None:
        """Drop all requests. Called by the training loop when it has taken them."""
        self.save_requested = self.evaluate_requested = self.stop_requested = False
        self.labels: set[str] = set()


class Callback:
    """Base class of callbacks that run on every rank. Override the hooks that you need.

    Callbacks are copied to the ranks at the start of every generation, so `__init__` must leave an object that can be
    pickled. `self.context` and `self.control` are set before the first hook. A step that is recomputed after a fault
    calls its hooks again, on a new copy with the state of the last committed step: see `state_dict`.
    """

    context: TrainingContext
    control: TrainingControl
    priority: int = 0
    """Callbacks of a higher priority are called first; those of equal priority in the order in which they are given."""
    optional: bool = False
    """What an exception of this callback does. False: end the run; True: print an alarm and drop the callback."""

    def on_generation_start(self) -> None:
        """Set up for a generation. Process groups are formed and the model is built; its state is not restored yet."""

    def pre_train(self) -> None:
        """Act before the first step of a generation, when the state of the run and of this callback is restored."""

    def pre_step(self) -> None:
        """Act before the passes of a step. Called again if the step is recomputed because its loss or norm was bad."""

    def post_forward_backward(self) -> None:
        """Act when this rank has finished its passes, before losses are reduced. Called again like `pre_step`."""

    def pre_optim_step(self) -> None:
        """Act before the optimizer step, when gradients are reduced, clipped and checked."""

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Act after the optimizer step. `metrics` has the keys of metrics.jsonl; entries can be added, as numbers.

        `train/loss`, `train/grad_norm` and `train/lr` are equal on all ranks; times and memory are not. Change state
        here: it becomes part of the state of the step afterwards.
        """

    def post_commit(self, metrics: dict[str, Any]) -> None:
        """Act when the step is committed. For effects outside the run: only the loss of all copies repeats the step."""

    def pre_eval(self) -> None:
        """Act before an evaluation."""

    def post_eval(self, metrics: dict[str, Any]) -> None:
        """Act after an evaluation. `metrics`: those of its step, without `val/loss` if a stop interrupted it.

        If a fault or restart undoes the effect on the state of this callback, `pre_eval` and this hook are called
        again, without an evaluation in between if its losses are known.
        """

    def pre_checkpoint_saved(self) -> None:
        """Act before a checkpoint of the current step."""

    def post_checkpoint_saved(self) -> None:
        """Act when the state of the current step is copied and being written; see `on_checkpoint_published`."""

    def on_error(self, error: BaseException) -> None:
        """Act when the generation ends with an error on this rank. Do not call collectives."""

    def close(self) -> None:
        """Release resources: the generation has ended on this rank, with or without an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same on all ranks: numbers, text, lists, dicts, tensors, `ParameterState`.

        Called after `on_generation_start` and after every step. Tensors are entries of the dict itself and keep their
        shape. State is part of checkpoints and in-memory snapshots, and reaches ranks that join.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Tensors have been filled in place. Not called in a fresh run."""


class DriverControl:
    """Requests of callbacks to the driver, as `self.control` of a driver callback. May be called at any time."""

    def __init__(self, stop: Callable[[], None], resize: Callable[[int | Literal["auto"]], None]):
        self.stop, self.resize = stop, resize


class DriverCallback:
    """Base class of callbacks that run in the driver, each in a thread of its own, so that none delays the run.

    They see every record once. A step that is recomputed after a fault is reported again.
    """

    control: DriverControl
    optional: bool = False
    """What an exception of this callback does. False: save and end the run; True: print an alarm and drop it."""

    def on_metrics(self, metrics: dict[str, Any]) -> None:
        """Act on a committed step that rank 0 has reported. `metrics` has the keys of metrics.jsonl.

        A step with a pending evaluation is reported again, with `val/loss`.
        """

    def on_incident(self, incident: dict[str, Any]) -> None:
        """Act on a failure when it is detected, and again when the run has recovered; keys as in incidents.jsonl."""

    def on_checkpoint_published(self, step: int, path: Path) -> None:
        """Act on a checkpoint that is complete."""

    def on_membership_changed(self, world_size: int, generation: int) -> None:
        """Act when a generation starts with this number of ranks."""

    def on_finished(self, outcome: str) -> None:
        """Act at the end of the run: "done", "stopped" (the same command resumes it) or "failed"."""
