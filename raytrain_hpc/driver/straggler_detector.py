"""Which ranks have kept the others waiting for a while."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from raytrain_hpc.elastic.watchdog import Signs, stragglers

_EVERY_S = 0.5
_IN_A_ROW = 3  # stretches of time in which a rank must have been slow: one can be chance


class Pace:
    """Compares signs of life of one stretch of time after the other, in one generation."""

    def __init__(self, factor: float):
        self._factor = factor
        self._looked = 0.0
        self._before: dict[int, Signs] = {}
        self._in_a_row: dict[int, int] = {}
        self._named: set[int] = set()

    def due(self) -> bool:
        """Whether it is time for another look."""
        return time.monotonic() - self._looked > _EVERY_S

    def look(self, signs: Mapping[int, Signs], load: Sequence[int]) -> dict[int, float]:
        """Ranks that turn out to be slow with this look, each once, and how many times as long as others they take.

        `load[r]`: what rank r has to do in a step.
        """
        self._looked = time.monotonic()
        if self._before.keys() != signs.keys():  # agents elsewhere are heard of later
            self._before = dict(signs)
        found = stragglers(self._before, signs, self._factor, load)
        if found is None:
            return {}
        self._before = dict(signs)
        self._in_a_row = {rank: self._in_a_row.get(rank, 0) + 1 for rank in found}
        slow = {rank: by for rank, by in found.items() if self._in_a_row[rank] >= _IN_A_ROW and rank not in self._named}
        self._named |= slow.keys()
        return slow
