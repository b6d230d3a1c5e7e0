"""Health of spares: one whose process ends, or does not answer, is noticed before it is needed as a rank."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from raytrain_hpc.driver.ray_messages import describe_actor_death

_HOLD_S = 2.0  # for which a spare holds a call
_SILENT_S = 10.0  # longer than the interpreter of a healthy spare is usually held
_REPLACEMENT_S = 300.0  # as long as a rank may take to build, load or save


class WatchableWorker(Protocol):
    """A worker whose process can be watched."""

    @property
    def actor(self) -> Any:
        """The Ray actor, with the method `hold`."""


W = TypeVar("W", bound=WatchableWorker)


@dataclass
class _Call:
    """The last call to a spare, at `start_time` (monotonic seconds). `reference` is None once it has returned."""

    reference: Any
    start_time: float

    def measure_delay_s(self) -> float:
        """Return for how many seconds its return is overdue."""
        return 0.0 if self.reference is None else time.monotonic() - self.start_time - _HOLD_S


class SpareHealth(Generic[W]):
    """Watcher of the workers that are no members of the generation that runs.

    Each has a call that it holds for two seconds before it returns, and that fails as soon as Ray knows that its
    process has ended. A spare gets half a message per second, and the driver never waits for the answer.
    """

    def __init__(self) -> None:
        self._calls: dict[W, _Call] = {}

    def update(self, spares: Iterable[W]) -> dict[W, str]:
        """Return the spares whose process has ended, or that have not answered for five minutes, and why.

        Makes the calls that are due to the others. Call again and again, with all ready workers that are no members.
        Does not block.
        """
        spares = list(spares)
        self._calls = {worker: self._calls[worker] for worker in spares if worker in self._calls}
        ended, now = self._receive(), time.monotonic()
        for worker in spares:
            call = self._calls.get(worker)
            is_due = call is None or (call.reference is None and now >= call.start_time + _HOLD_S)
            if is_due and worker not in ended:
                self._calls[worker] = _Call(worker.actor.hold.remote(_HOLD_S), now)
        return ended

    def _receive(self) -> dict[W, str]:
        """Receive the answers that have arrived, and return the spares that have ended, which are watched no more."""
        worker_of_call = {call.reference: worker for worker, call in self._calls.items() if call.reference is not None}
        pending, ended = list(worker_of_call), dict[W, str]()
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=0) if pending else ([], [])
        for worker in (worker_of_call[reference] for reference in ready):
            if reason := _finish(self._calls[worker]):
                ended[worker] = reason
        for worker in (worker_of_call[reference] for reference in pending):
            if (delay_s := self._calls[worker].measure_delay_s()) > _REPLACEMENT_S:
                ended[worker] = f"it has not answered for {delay_s:.0f} s"
        for worker in ended:
            del self._calls[worker]
        return ended

    def is_silent(self, worker: W) -> bool:
        """Return whether a spare had not answered in time when answers were last received."""
        return worker in self._calls and self._calls[worker].measure_delay_s() > _SILENT_S


def _finish(call: _Call) -> str:
    """Read the result of a call that has returned. Return why the process has ended, "" if it has not."""
    reference, call.reference = call.reference, None
    try:
        ray.get(reference)
    except (ActorUnavailableError, RayTaskError):  # the next call tells whether it stays unavailable
        return ""
    except RayError as error:
        return describe_actor_death(error)
    return ""
