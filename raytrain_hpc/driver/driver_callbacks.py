"""Driver callbacks in threads of their own: experiment trackers and those of the user."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Full, Queue
from typing import Any, Literal

from raytrain_hpc.callbacks.callback import DriverCallback, DriverControl
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.observability.experiment_trackers import list_tracker_factories

DriverHook = Literal["on_metrics", "on_incident", "on_checkpoint_published", "on_membership_changed"]
_CLOSE_TIMEOUT_S = 10.0  # longest wait at the end of a run for events still in the queue
_MAX_EVENTS = 10_000  # in a queue: some 30 MB


class BackgroundCallback:
    """A driver callback in its own thread, dropped after its first exception.

    `create`: called in the thread, since it may log in to a server. `on_error`: called with the exception and whether
    the callback is optional; True if it could not be created.
    """

    def __init__(
        self,
        name: str,
        create: Callable[[], DriverCallback],
        on_error: Callable[[str, Exception, bool], None],
        alarm: Callable[[str], None],
    ):
        self._name, self._create, self._on_error, self._alarm = name, create, on_error, alarm
        self._queue: Queue[tuple[str, tuple[Any, ...]]] = Queue(_MAX_EVENTS)
        self._is_behind = False  # events are lost
        self._thread = threading.Thread(target=self._run, name=f"callback-{name}", daemon=True)
        self._thread.start()

    def call(self, hook: DriverHook, *arguments: Any) -> None:
        """Queue the call of a hook. Does not block. While 10,000 calls are queued, further ones are dropped."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((hook, arguments))
            self._is_behind = False
        except Full:
            if not self._is_behind:
                self._is_behind = True
                self._alarm(f"{self._name}: {_MAX_EVENTS:,} events behind; it misses further ones; the run continues")

    def close(self, outcome: str) -> None:
        """Queue the call of `on_finished`, and wait until all hooks have been called, for at most 10 s."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        with suppress(Full):
            self._queue.put(("on_finished", (outcome,)), timeout=_CLOSE_TIMEOUT_S if self._thread.is_alive() else 0.0)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._alarm(f"{self._name}: still busy {_CLOSE_TIMEOUT_S:g} s after the end of the run")

    def _run(self) -> None:
        is_optional = True
        try:
            callback = self._create()
            is_optional = callback.optional
            hook = ""
            while hook != "on_finished":
                hook, arguments = self._queue.get()
                getattr(callback, hook)(*arguments)
        except Exception as error:  # of any type: the code is a library's or the user's
            self._on_error(self._name, error, is_optional)


class DriverCallbackList:
    """All driver callbacks of a run.

    An exception of a callback that is not optional stops the run; `raise_error` raises it at the end.
    """

    def __init__(
        self,
        factories: Mapping[str, Callable[[], DriverCallback]],
        control: DriverControl,
        alarm: Callable[[str], None],
    ):
        """Start a thread for each factory, by name. `alarm`: prints a line."""
        self._control, self._alarm = control, alarm
        self._error: CallbackError | None = None
        self._callbacks = [
            BackgroundCallback(name, partial(self._create, create), self._handle_error, alarm)
            for name, create in factories.items()
        ]

    @classmethod
    def start(
        cls,
        factories: Mapping[str, Callable[[], DriverCallback]],
        callbacks: Sequence[DriverCallback],
        control: DriverControl,
        alarm: Callable[[str], None],
    ) -> DriverCallbackList:
        """Start the callbacks that `factories` create, and existing ones, which are named by their classes."""
        existing = {
            f"{type(callback).__name__}{f'#{number}' if number else ''}": partial(_identity, callback)
            for number, callback in enumerate(callbacks)
        }
        return cls({**factories, **existing}, control, alarm)

    def call(self, hook: DriverHook, *arguments: Any) -> None:
        """Call a hook of all callbacks, in the background. Each gets copies of the dicts among the arguments."""
        for callback in self._callbacks:
            callback.call(hook, *(dict(value) if isinstance(value, dict) else value for value in arguments))

    def close(self, outcome: str) -> None:
        """Tell all callbacks how the run has ended, and wait for them."""
        for callback in self._callbacks:
            callback.close(outcome)

    def raise_error(self) -> None:
        """Raise the error of the first callback that failed and is not optional, if any."""
        if self._error is not None:
            raise self._error

    def _create(self, create: Callable[[], DriverCallback]) -> DriverCallback:
        callback = create()
        callback.control = self._control
        return callback

    def _handle_error(self, name: str, error: Exception, is_optional: bool) -> None:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if is_optional:
            self._alarm(f"{name}: stopped ({reason}); the run continues")
            return
        self._alarm(f"callback {name}: failed ({reason}); the run stops")
        self._error = self._error or CallbackError(f"callback {name}: failed in the driver: {reason}")
        self._control.stop()


def _identity(callback: DriverCallback) -> DriverCallback:
    return callback


def start_driver_callbacks(
    config: Config,
    callbacks: Sequence[DriverCallback],
    control: DriverControl,
    alarm: Callable[[str], None],
    has_dashboard: bool,
) -> DriverCallbackList:
    """Start the trackers that the settings ask for, gauges on Ray's dashboard if there is one, and the user's."""
    factories = list_tracker_factories(config)
    if has_dashboard and config.logging.ray_metrics:
        from raytrain_hpc.driver.ray_metrics import RayMetricsTracker  # imports Ray

        factories["logging.ray_metrics"] = partial(RayMetricsTracker, config.run.name)
    return DriverCallbackList.start(factories, callbacks, control, alarm)
