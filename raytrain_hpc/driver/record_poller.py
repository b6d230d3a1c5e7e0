"""Records of the ranks of a generation, fetched behind what runs: a rank that gives no answer holds nobody up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_hpc.driver.throttle import Throttle
from raytrain_hpc.elastic.watchdog import WorkerHealth
from raytrain_hpc.runtime.control_channel import Record

_POLL_INTERVAL_S = 1.0  # often enough to read along, seldom enough to cost nothing
_MAX_POLLS_PER_S = 500  # questions at most: the first rank has the steps to tell, the others little
_URGENT_INTERVAL_S = 0.05  # while stopping, and where a record is urgent
_REPLY_TIMEOUT_S = 10.0


class RecordPoller:
    """Asks each rank for its records again and again, one question at a time."""

    def __init__(self, actors: Sequence[Any], on_record: Callable[[Record], None]):
        self._actors, self._on_record = actors, on_record
        now = time.time()
        self._pending: dict[int, tuple[float, Any]] = {}
        self._throttle = Throttle(0.0)
        self._urgent_counts = [0] * len(actors)  # urgent records that each rank had made when it was last asked
        self.last_reply_unix = [now] * len(actors)  # when each rank last answered, unix time

    def poll(self, health: Mapping[int, WorkerHealth], *, urgent: bool = False) -> None:
        """Take what has come, and ask who has not been asked for a while, or has something urgent. Returns at once."""
        if not self._throttle.is_ready():
            return
        with self._throttle.measure():
            self._receive(0.0)
            now, seldom = time.time(), len(self._actors) / _MAX_POLLS_PER_S
            for rank, actor in enumerate(self._actors):
                num_urgent = health[rank].num_urgent_records if rank in health else 0
                is_urgent = urgent or num_urgent > self._urgent_counts[rank]
                often = max(_URGENT_INTERVAL_S if is_urgent else _POLL_INTERVAL_S, seldom)
                patience = often if rank else min(often, _POLL_INTERVAL_S)
                if rank not in self._pending and now - self.last_reply_unix[rank] > patience:
                    self._pending[rank], self._urgent_counts[rank] = (now, actor.drain.remote()), num_urgent

    def fetch_remaining(self, timeout_s: float = _REPLY_TIMEOUT_S, exclude: Collection[int] = ()) -> None:
        """Take all records that there are, of the ranks that answer in time; `without` those that are gone."""
        until = time.monotonic() + timeout_s
        self._pending = {rank: asked for rank, asked in self._pending.items() if rank not in exclude}
        self._receive(timeout_s)
        left = [(rank, actor) for rank, actor in enumerate(self._actors) if rank not in exclude]
        self._pending |= {rank: (time.time(), actor.drain.remote()) for rank, actor in left}
        self._receive(max(0.0, until - time.monotonic()))

    def find_silent_ranks(self) -> list[int]:
        """Ranks whose answer has been waited for too long."""
        return [rank for rank, (when, _) in self._pending.items() if time.time() - when > _REPLY_TIMEOUT_S]

    def _receive(self, timeout_s: float) -> None:
        asked = {answer: rank for rank, (_, answer) in self._pending.items()}
        if not asked:
            return
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        for rank in sorted(asked[answer] for answer in ready):
            _, answer = self._pending.pop(rank)
            try:
                records = ray.get(answer)
            except RayError:
                continue  # its run call reports the death
            self.last_reply_unix[rank] = time.time()
            for record in records:
                self._on_record(record)
