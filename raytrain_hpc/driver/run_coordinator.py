"""Coordinator of all runs on a Ray cluster: a named actor without devices that knows what each run holds and wants.

It keeps nothing that the runs do not report again within a second: if it dies, the next report starts another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayError

from raytrain_hpc.driver.autoscaler import Bundle, send_request
from raytrain_hpc.elastic.device_allocation import (
    Allowance,
    DeviceClaim,
    count_foreign_devices,
    find_allowance,
    list_all_bundles,
)

CLAIM_TTL_S = 3.0  # a run that has not reported for as long has ended
_SETTLE_S = 1.5  # in which all runs report to a coordinator that replaces another one
_START_TIME_S = 10.0  # a run that is older than a new coordinator by more has had another one
_FOREIGN_WINDOW_S = 5.0  # Ray reports slots as taken or free later than the run that takes or releases them
_TICK_S = 0.5
_IDLE_S = 60.0  # without runs, after which the actor ends

_log = logging.getLogger(__name__)


class ClaimTable:
    """The newest claim of each run, and the devices of other jobs. Times are unix seconds."""

    def __init__(self, now: float):
        self._started_at, self.idle_since = now, now
        self._claims: dict[str, DeviceClaim] = {}
        self._claimed_at: dict[str, float] = {}
        self._foreign: dict[str, deque[tuple[float, int]]] = {}  # resource -> (time, devices of other jobs)
        self._allowances: dict[str, Allowance] = {}

    @property
    def claims(self) -> list[DeviceClaim]:
        """The claims of all runs."""
        return list(self._claims.values())

    def update(self, claim: DeviceClaim, now: float) -> Allowance | None:
        """Replace the claim of a run, and return its allowance; None while not all runs may have reported."""
        self._claims[claim.run_id], self._claimed_at[claim.run_id] = claim, now
        same = [other for other in self._claims.values() if other.resource == claim.resource]
        window = self._foreign.setdefault(claim.resource, deque())
        window.append((now, count_foreign_devices(same)))
        while window[0][0] < now - _FOREIGN_WINDOW_S:
            window.popleft()
        if now < self._started_at + _SETTLE_S and claim.since < self._started_at - _START_TIME_S:
            return None
        devices = max(other.total for other in same) - min(count for _, count in window)
        self._allowances[claim.run_id] = find_allowance(devices, same, claim.run_id)
        return self._allowances[claim.run_id]

    def remove(self, run_id: str) -> None:
        """Forget a run that has released its devices."""
        for of_run in (self._claims, self._claimed_at, self._allowances):
            of_run.pop(run_id, None)  # type: ignore[attr-defined]

    def expire(self, now: float) -> None:
        """Forget the runs that have not reported for `CLAIM_TTL_S`."""
        for run_id in [run_id for run_id, at in self._claimed_at.items() if at < now - CLAIM_TTL_S]:
            self.remove(run_id)
        if self._claims:
            self.idle_since = now

    def list_bundles(self) -> list[Bundle]:
        """Return what all runs together request of the autoscaler."""
        return list_all_bundles(self.claims, self._allowances)


class RunCoordinator:
    """The actor. Its thread forgets runs that have died, and sends their request to Ray's autoscaler.

    Ray keeps one request per cluster, so that it has to be that of all runs.
    """

    def __init__(self, send: Callable[[Sequence[Bundle]], None] = send_request, *, in_background: bool = True):
        """Initialize the actor. `in_background=False`: `tick` is called by the caller."""
        self._table, self._lock = ClaimTable(time.time()), threading.Lock()
        self._send, self._sent = send, list[Bundle]()
        if in_background:
            threading.Thread(target=self._run, name="coordinator", daemon=True).start()

    def report(self, claim: DeviceClaim) -> Allowance | None:
        """Replace the claim of a run and return its allowance, as `ClaimTable.update`."""
        with self._lock:
            return self._table.update(claim, time.time())

    def leave(self, run_id: str) -> None:
        """Forget a run that has ended."""
        with self._lock:
            self._table.remove(run_id)

    def list_claims(self) -> list[DeviceClaim]:
        """Return the newest claim of each run."""
        with self._lock:
            return self._table.claims

    def tick(self, now: float) -> bool:
        """Forget runs that have died, and send a changed request. Returns False when there was no run for a minute."""
        with self._lock:
            self._table.expire(now)
            bundles, idle_s = self._table.list_bundles(), now - self._table.idle_since
        if bundles == self._sent:
            return idle_s < _IDLE_S
        try:
            self._send(bundles)
            self._sent = bundles
        except (RayError, RuntimeError, OSError) as error:  # tried again
            _log.warning("the request did not reach Ray's autoscaler: %s", error)
        return True

    def _run(self) -> None:
        while self.tick(time.time()):
            time.sleep(_TICK_S)
        ray.kill(ray.get_runtime_context().current_actor)
