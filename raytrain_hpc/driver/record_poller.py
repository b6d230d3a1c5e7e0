"""Records of the ranks of a generation, fetched behind what runs: a rank that gives no answer holds nobody up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_hpc.driver.throttle import Sparing
from raytrain_hpc.elastic.watchdog import Signs
from raytrain_hpc.runtime.control_channel import Record

_EVERY_S = 1.0  # often enough to read along, seldom enough to cost nothing
_A_SECOND = 500  # questions at most: the first rank has the steps to tell, the others little
_HURRY_S = 0.05  # while stopping, and where a record is urgent
_ANSWER_S = 10.0


class Listener:
    """Asks each rank for its records again and again, one question at a time."""

    def __init__(self, actors: Sequence[Any], handle: Callable[[Record], None]):
        self._actors, self._handle = actors, handle
        now = time.time()
        self._asked: dict[int, tuple[float, Any]] = {}
        self._looking = Sparing(0.0)
        self._urged = [0] * len(actors)  # urgent records that each rank had made when it was last asked
        self.seen = [now] * len(actors)  # when each rank last answered, unix time

    def listen(self, signs: Mapping[int, Signs], *, hurry: bool = False) -> None:
        """Take what has come, and ask who has not been asked for a while, or has something urgent. Returns at once."""
        if not self._looking.due():
            return
        with self._looking.doing():
            self._take(0.0)
            now, seldom = time.time(), len(self._actors) / _A_SECOND
            for rank, actor in enumerate(self._actors):
                urgent = signs[rank].urgent if rank in signs else 0
                often = max(_HURRY_S if hurry or urgent > self._urged[rank] else _EVERY_S, seldom)
                patience = often if rank else min(often, _EVERY_S)
                if rank not in self._asked and now - self.seen[rank] > patience:
                    self._asked[rank], self._urged[rank] = (now, actor.drain.remote()), urgent

    def finish(self, timeout_s: float = _ANSWER_S, without: Collection[int] = ()) -> None:
        """Take all records that there are, of the ranks that answer in time; `without` those that are gone."""
        until = time.monotonic() + timeout_s
        self._asked = {rank: asked for rank, asked in self._asked.items() if rank not in without}
        self._take(timeout_s)
        left = [(rank, actor) for rank, actor in enumerate(self._actors) if rank not in without]
        self._asked |= {rank: (time.time(), actor.drain.remote()) for rank, actor in left}
        self._take(max(0.0, until - time.monotonic()))

    def silent(self) -> list[int]:
        """Ranks whose answer has been waited for too long."""
        return [rank for rank, (when, _) in self._asked.items() if time.time() - when > _ANSWER_S]

    def _take(self, timeout_s: float) -> None:
        asked = {answer: rank for rank, (_, answer) in self._asked.items()}
        if not asked:
            return
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        for rank in sorted(asked[answer] for answer in ready):
            _, answer = self._asked.pop(rank)
            try:
                records = ray.get(answer)
            except RayError:
                continue  # its run call reports the death
            self.seen[rank] = time.time()
            for record in records:
                self._handle(record)
