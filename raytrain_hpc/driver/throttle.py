"""How often something is done beside a run, so that it never becomes the driver's main work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_SHARE = 0.1  # of the driver's time


class Sparing:
    """Says when it is time again: `every_s` after the last time, or later where that took more than a tenth of it."""

    def __init__(self, every_s: float):
        self._every_s, self._next = every_s, 0.0

    def due(self) -> bool:
        """Whether it is time."""
        return time.monotonic() >= self._next

    @contextmanager
    def doing(self) -> Iterator[None]:
        """While it is done."""
        began = time.monotonic()
        yield
        ended = time.monotonic()
        self._next = ended + max(self._every_s, (ended - began) / _SHARE)
