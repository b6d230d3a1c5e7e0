"""Records of a generation's ranks, fetched asynchronously: a rank that does not reply delays no other rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_hpc.driver.throttle import Throttle
from raytrain_hpc.elastic.watchdog import WorkerHealth
from raytrain_hpc.runtime.control_channel import Record

_POLL_INTERVAL_S = 1.0  # short enough to follow the run, long enough to cost nothing
_MAX_POLLS_PER_S = 500  # to all ranks together: only rank 0 reports steps
_URGENT_INTERVAL_S = 0.05  # while stopping, and for urgent records
_REPLY_TIMEOUT_S = 10.0
_MAX_DELAY_S = 2.0  # after a poll that took long


class RecordPoller:
    """Poller of each rank's records, with at most one outstanding request per rank."""

    def __init__(self, actors: Sequence[Any], on_record: Callable[[Record], None]):
        self._actors, self._on_record = actors, on_record
        self._pending: dict[int, tuple[float, Any]] = {}  # requests, with the monotonic seconds at which they were sent
        self._throttle = Throttle(0.0, _MAX_DELAY_S)
        self._urgent_counts = [0] * len(actors)  # urgent records of each rank at its last request
        self._replied_at = [time.monotonic()] * len(actors)
        self.seen_at = [time.time()] * len(actors)  # unix time of each rank's last reply

    def poll(self, health: Mapping[int, WorkerHealth], *, urgent: bool = False) -> None:
        """Handle the records that have arrived and send the requests that are due; return at once.

        A request is due if the last reply is old enough, or earlier if `health` counts a new urgent record of the rank.
        `urgent`: poll all ranks at the short interval.
        """
        if not self._throttle.is_ready():
            return
        with self._throttle.measure():
            self._receive(0.0)
            now, min_interval_s = time.monotonic(), len(self._actors) / _MAX_POLLS_PER_S
            for rank, actor in enumerate(self._actors):
                num_urgent = health[rank].num_urgent_records if rank in health else 0
                is_urgent = urgent or num_urgent > self._urgent_counts[rank]
                interval_s = max(_URGENT_INTERVAL_S if is_urgent else _POLL_INTERVAL_S, min_interval_s)
                rank_interval_s = interval_s if rank else min(interval_s, _POLL_INTERVAL_S)
                if rank not in self._pending and now - self._replied_at[rank] > rank_interval_s:
                    self._pending[rank], self._urgent_counts[rank] = (now, actor.drain.remote()), num_urgent

    def fetch_remaining(self, timeout_s: float = _REPLY_TIMEOUT_S, exclude: Collection[int] = ()) -> None:
        """Handle all remaining records of the ranks that reply within `timeout_s`. Ranks in `exclude` have failed."""
        deadline = time.monotonic() + timeout_s
        self._pending = {rank: request for rank, request in self._pending.items() if rank not in exclude}
        self._receive(timeout_s)
        remaining = [(rank, actor) for rank, actor in enumerate(self._actors) if rank not in exclude]
        self._pending |= {rank: (time.monotonic(), actor.drain.remote()) for rank, actor in remaining}
        self._receive(max(0.0, deadline - time.monotonic()))

    def find_silent_ranks(self) -> list[int]:
        """Return the ranks whose reply has been outstanding for more than 10 s.

        Handles replies first that have arrived while this process was busy.
        """
        if self._list_overdue_ranks():
            self._receive(0.0)
        return self._list_overdue_ranks()

    def _list_overdue_ranks(self) -> list[int]:
        now = time.monotonic()
        return [rank for rank, (sent, _) in self._pending.items() if now - sent > _REPLY_TIMEOUT_S]

    def _receive(self, timeout_s: float) -> None:
        """Handle the records of all replies that arrive within `timeout_s`."""
        rank_of_reply = {reply: rank for rank, (_, reply) in self._pending.items()}
        if not rank_of_reply:
            return
        ready, _ = ray.wait(list(rank_of_reply), num_returns=len(rank_of_reply), timeout=timeout_s)
        for rank in sorted(rank_of_reply[reply] for reply in ready):
            _, reply = self._pending.pop(rank)
            try:
                records = ray.get(reply)
            except RayError:
                continue  # the rank's run call reports the failure
            self._replied_at[rank], self.seen_at[rank] = time.monotonic(), time.time()
            for record in records:
                self._on_record(record)
