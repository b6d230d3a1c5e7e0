"""Straggler detection: ranks that are slower than the others in several consecutive readings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from raytrain_hpc.elastic.watchdog import WorkerHealth, find_stragglers

_CHECK_INTERVAL_S = 0.5
_MIN_CONSECUTIVE = 3  # readings in which a rank must be slow, since one may be chance


class StragglerDetector:
    """Detector of slow ranks, from successive health readings of one generation.

    `factor`: a rank is slow if the same work takes it this many times as long as the other ranks.
    """

    def __init__(self, factor: float):
        self._factor = factor
        self._last_check_time = 0.0
        self._previous_health: dict[int, WorkerHealth] = {}
        self._consecutive: dict[int, int] = {}
        self._reported: set[int] = set()

    def is_due(self) -> bool:
        """Return whether the next comparison is due."""
        return time.monotonic() - self._last_check_time > _CHECK_INTERVAL_S

    def detect(self, health: Mapping[int, WorkerHealth], load: Sequence[int]) -> dict[int, float]:
        """Compare with the previous reading, and return the ranks newly detected as slow, with their slowdown.

        The slowdown is the time that a rank takes for the same work, relative to the other ranks. Each rank is returned
        once per generation. `load[r]` is the number of microbatches of rank r in a step.
        """
        self._last_check_time = time.monotonic()
        if self._previous_health.keys() != health.keys():  # remote agents reply later than the local one
            self._previous_health = dict(health)
        slowdowns = find_stragglers(self._previous_health, health, self._factor, load)
        if slowdowns is None:
            return {}
        self._previous_health = dict(health)
        self._consecutive = {rank: self._consecutive.get(rank, 0) + 1 for rank in slowdowns}
        newly_slow = {
            rank: slowdown
            for rank, slowdown in slowdowns.items()
            if self._consecutive[rank] >= _MIN_CONSECUTIVE and rank not in self._reported
        }
        self._reported |= newly_slow.keys()
        return newly_slow
