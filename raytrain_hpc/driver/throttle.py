"""How often something is done beside a run, so that it never becomes the driver's main work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_MAX_TIME_FRACTION = 0.1  # of the driver's time


class Throttle:
    """Says when it is time again: `every_s` after the last time, or later where that took more than a tenth of it."""

    def __init__(self, interval_s: float):
        self._interval_s, self._next_time = interval_s, 0.0

    def is_ready(self) -> bool:
        """Whether it is time."""
        return time.monotonic() >= self._next_time

    @contextmanager
    def measure(self) -> Iterator[None]:
        """While it is done."""
        began = time.monotonic()
        yield
        ended = time.monotonic()
        self._next_time = ended + max(self._interval_s, (ended - began) / _MAX_TIME_FRACTION)
