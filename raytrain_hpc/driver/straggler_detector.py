"""Which ranks have kept the others waiting for a while."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from raytrain_hpc.elastic.watchdog import WorkerHealth, find_stragglers

_CHECK_INTERVAL_S = 0.5
_MIN_CONSECUTIVE = 3  # stretches of time in which a rank must have been slow: one can be chance


class StragglerDetector:
    """Compares signs of life of one stretch of time after the other, in one generation."""

    def __init__(self, factor: float):
        self._factor = factor
        self._last_check_time = 0.0
        self._previous_health: dict[int, WorkerHealth] = {}
        self._consecutive: dict[int, int] = {}
        self._reported: set[int] = set()

    def is_due(self) -> bool:
        """Whether it is time for another look."""
        return time.monotonic() - self._last_check_time > _CHECK_INTERVAL_S

    def detect(self, health: Mapping[int, WorkerHealth], load: Sequence[int]) -> dict[int, float]:
        """Ranks that turn out to be slow with this look, each once, and how many times as long as others they take.

        `load[r]`: what rank r has to do in a step.
        """
        self._last_check_time = time.monotonic()
        if self._previous_health.keys() != health.keys():  # agents elsewhere are heard of later
            self._previous_health = dict(health)
        found = find_stragglers(self._previous_health, health, self._factor, load)
        if found is None:
            return {}
        self._previous_health = dict(health)
        self._consecutive = {rank: self._consecutive.get(rank, 0) + 1 for rank in found}
        slow = {
            rank: by
            for rank, by in found.items()
            if self._consecutive[rank] >= _MIN_CONSECUTIVE and rank not in self._reported
        }
        self._reported |= slow.keys()
        return slow
