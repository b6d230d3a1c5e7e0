"""Callbacks of one rank: calls their hooks in order of priority, and agrees with the other ranks on their requests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from raytrain_hpc.callbacks.callback import Callback, TrainingContext, TrainingControl
from raytrain_hpc.data.samples.sample_reader import restore_generators
from raytrain_hpc.distributed.process_groups import GenerationAbortedError, ParallelContext
from raytrain_hpc.elastic.fault_attribution import is_peer_failure
from raytrain_hpc.errors import CallbackError, RaytrainError
from raytrain_hpc.observability.metrics import METRIC_KEYS

Hook = Literal[
    "on_generation_start",
    "pre_train",
    "pre_step",
    "post_forward_backward",
    "pre_optim_step",
    "post_step",
    "post_commit",
    "pre_eval",
    "post_eval",
    "pre_checkpoint_saved",
    "post_checkpoint_saved",
    "on_error",
    "close",
]
_EXIT_CODE = 4  # of a callback that fails: the run has started
HOOKS: tuple[Hook, ...] = Hook.__args__  # type: ignore[attr-defined]
_METRIC_HOOKS: tuple[Hook, ...] = ("post_step", "post_commit", "post_eval")  # with the metrics as their argument


@dataclass(frozen=True)
class CallbackRequests:
    """What callbacks of any rank ask for. `labels`: those of the checkpoint, sorted."""

    save: bool = False
    evaluate: bool = False
    stop: bool = False
    labels: tuple[str, ...] = ()

    def union(self, other: CallbackRequests) -> CallbackRequests:
        """Return what either of two asks for."""
        labels = tuple(sorted({*self.labels, *other.labels}))
        return CallbackRequests(
            self.save or other.save, self.evaluate or other.evaluate, self.stop or other.stop, labels
        )


class CallbackList:
    """The callbacks of this project and of the user, in order of priority.

    An exception of a user's callback becomes a CallbackError that names it; if the callback is optional, it is reported
    and the callback is dropped. Errors of collectives, which say that another rank has failed, pass unchanged.
    """

    def __init__(
        self,
        user: Sequence[Callback],
        context: TrainingContext,
        parallel_context: ParallelContext,
        *,
        eval_metrics: Collection[str] = (),
        in_callback_phase: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Create a list of the user's callbacks.

        `in_callback_phase`: returns a context in which the watchdog waits long, for callbacks that may take long.
        """
        self.context, self.control = context, TrainingControl(can_evaluate=bool(eval_metrics))
        # Keys that a callback must not write. Without an evaluation of its own, a run leaves val/... to callbacks.
        self._own_metrics = {*(key for key in METRIC_KEYS if not key.startswith("val/")), *eval_metrics}
        self._parallel_context = parallel_context
        self.user, self._in_callback_phase = tuple(user), in_callback_phase
        self._slow: set[Callback] = set(user)
        self.keeps_generators = False  # whether random generators have their state after a hook
        self._callbacks: list[Callback] = []
        self.dropped: set[Callback] = set()  # optional ones that have failed on any rank
        self.add(*user)

    def add(self, *callbacks: Callback, is_slow: bool = False) -> None:
        """Add callbacks, and set their context and control. `is_slow`: they may take long, as those of the user."""
        self._slow.update(callbacks if is_slow else ())
        for callback in callbacks:
            callback.context, callback.control = self.context, self.control
        self._callbacks = sorted((*self._callbacks, *callbacks), key=lambda callback: -callback.priority)
        self._hooks: dict[Hook, list[Callable[..., None]]] = {
            hook: [self._make_call(callback, hook) for callback in self._callbacks if _overrides(callback, hook)]
            for hook in HOOKS
        }

    @contextmanager
    def close_on_exit(self) -> Iterator[None]:
        """Call `close` at the end of the context, after `on_error` if it ends with an error."""
        with self.close_on_error():
            yield
        try:
            self.run("close")
        finally:
            self._release()

    def run(self, hook: Hook, *arguments: Any) -> None:
        """Call a hook of all callbacks that override it."""
        calls = self._hooks[hook]
        if calls:
            with restore_generators() if self.keeps_generators else nullcontext():
                for call in calls:
                    call(*arguments)

    def get_own_requests(self) -> CallbackRequests:
        """Return the requests of this rank that are not agreed on yet."""
        control = self.control
        flags = (control.save_requested, control.evaluate_requested, control.stop_requested)
        return CallbackRequests(*flags, tuple(sorted(control.labels)))

    def agree_requests(self, *, always: bool = False) -> CallbackRequests:
        """Return and clear the requests of all ranks, and drop callbacks that have failed on any.

        Collective if there are callbacks of a user, or `always`.

        This project's own callbacks request the same on every rank, so a run without others communicates nothing.
        """
        requests = self.get_own_requests()
        self.control.clear()
        group = self._parallel_context.world_group
        if not (self.user or always) or group is None:
            return requests
        flags = requests.save, requests.evaluate, requests.stop
        values = [*flags, bool(requests.labels), *(callback in self.dropped for callback in self.user)]
        counts = torch.tensor(values, dtype=torch.float64, device=self._parallel_context.device)
        dist.all_reduce(counts, group=group)
        save, evaluate, stop, is_labelled, *are_dropped = (count > 0 for count in counts.tolist())
        self.dropped |= {callback for callback, drop in zip(self.user, are_dropped, strict=True) if drop}
        if is_labelled:
            gathered: list[tuple[str, ...]] = [()] * dist.get_world_size(group)
            dist.all_gather_object(gathered, requests.labels, group=group)
            requests = replace(requests, labels=tuple(sorted({label for labels in gathered for label in labels})))
        return replace(requests, save=save, evaluate=evaluate, stop=stop)

    @contextmanager
    def close_on_error(self) -> Iterator[None]:
        """Call `on_error` and `close` if the context, in which the generation is built, ends with an error."""
        try:
            yield
        except BaseException as error:
            self._run_after_error("on_error", error)
            self._run_after_error("close")
            self._release()
            raise

    def _release(self) -> None:
        """Drop references to the model and its state, which would form cycles and keep their memory alive."""
        self._hooks = {hook: [] for hook in HOOKS}
        self.context.modules, self.context.parameters = {}, {}
        self.context.get_gradients, self.context.exchange_weights = dict, lambda state: None

    def _run_after_error(self, hook: Hook, *arguments: Any) -> None:
        """Call a hook while an error is being raised, which no other error may replace."""
        for call in self._hooks[hook]:
            try:
                call(*arguments)
            except Exception as error:  # of any type: a callback may be in any state
                self.context.log(f"alarm: rank {self.context.rank}: {hook} of a callback failed: {error}")

    def _make_call(self, callback: Callback, hook: Hook) -> Callable[..., None]:
        method: Callable[..., None] = getattr(callback, hook)
        if callback in self._slow:
            method = self._make_slow_call(method)
        if callback not in self.user:
            return method

        def guarded(*arguments: Any) -> None:
            if callback in self.dropped:
                return
            before = dict(arguments[0]) if hook in _METRIC_HOOKS else {}
            try:
                method(*arguments)
                if hook in _METRIC_HOOKS:
                    self._check_metrics(callback, before, arguments[0])
            except (RaytrainError, GenerationAbortedError):
                raise
            except Exception as error:  # of any type: the code is the user's
                if is_peer_failure(str(error)):
                    raise
                self._handle_error(callback, hook, error)

        return guarded

    def _make_slow_call(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            with self._in_callback_phase():
                method(*arguments)

        return call

    def _check_metrics(self, callback: Callback, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Raise CallbackError if a callback has changed a metric of the run, or added an entry that is no number."""
        changed = [key for key, value in after.items() if key not in before or value is not before[key]]
        name = get_callback_name(callback)
        for key in [*(key for key in before if key not in after), *changed]:
            if key in self._own_metrics:
                raise CallbackError(f"callback {name}: metrics[{key!r}] is written by the run; choose another key")
        for key in changed:
            if not isinstance(after[key], int | float | None):
                kind = type(after[key]).__name__
                raise CallbackError(f"callback {name}: metrics[{key!r}] is {kind}; add numbers only")

    def _handle_error(self, callback: Callback, hook: Hook, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        place = f"callback {get_callback_name(callback)}: {hook} failed on rank {self.context.rank}"
        message = f"{place} at step {self.context.step}: {reason}"
        if not callback.optional or hook == "on_generation_start":  # without it, its state does not exist
            callback_error = CallbackError(message)
            callback_error.exit_code = _EXIT_CODE
            raise callback_error from error
        self.dropped.add(callback)
        self.context.log(f"alarm: {message}; it is optional, and dropped until the next start")


def get_callback_name(callback: object) -> str:
    """Return the name of a callback in messages and in its state: that of its class."""
    return type(callback).__name__


def _overrides(callback: Callback, hook: Hook) -> bool:
    return getattr(type(callback), hook, None) is not getattr(Callback, hook)
