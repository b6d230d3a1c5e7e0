"""Rate limit for work of the driver during training, so that such work never dominates its time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

_MAX_TIME_FRACTION = 0.1  # of the driver's time


class Throttle:
    """Rate limit: the work is due `interval_s` after its last run, or later, to take at most a tenth of the time.

    It is due `max_delay_s` after its last run in any case.
    """

    def __init__(self, interval_s: float, max_delay_s: float = inf):
        self._interval_s, self._max_delay_s, self._next_time = interval_s, max_delay_s, 0.0

    def is_ready(self) -> bool:
        """Return whether the work is due."""
        return time.monotonic() >= self._next_time

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time one run of the work, which decides when the next one is due."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        self._next_time = end + min(self._max_delay_s, max(self._interval_s, (end - start) / _MAX_TIME_FRACTION))
