"""Deadline until which the ranks of an aborted generation may end."""

from __future__ import annotations

import time
from collections.abc import Collection

from raytrain_hpc.driver.health_monitor import HealthMonitor


class ExitDeadline:
    """Deadline until which ranks may end, `settle_s` seconds after they have last been busy.

    A busy rank may run a callback or write to storage, which nothing interrupts. It ends afterwards, and its process
    and the state in its memory are as good as those of other ranks.
    """

    def __init__(self, health: HealthMonitor):
        """Begin to wait."""
        self._health, self.settle_s = health, health.compute_settle_timeout_s()
        self._time = time.monotonic() + self.settle_s

    def has_passed(self, ranks: Collection[int]) -> bool:
        """Return whether the ranks that have not ended so far are not going to."""
        now = time.monotonic()
        if self._health.find_busy_ranks() & set(ranks):
            self._time = now + self.settle_s
        return now >= self._time
