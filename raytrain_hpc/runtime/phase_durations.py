"""Durations of the phases in which a rank becomes ready to train."""

from __future__ import annotations

import time
from typing import Any, Literal

BuildPhase = Literal["communicator", "state", "data"]


class PhaseDurations:
    """Seconds per phase of building a rank, measured from one end of a phase to the next.

    "communicator": process groups are formed; "state": the model is built and its state restored; "data": dataset and
    loader are opened.
    """

    def __init__(self) -> None:
        """Begin the first phase now."""
        self._last_end = time.monotonic()
        self.seconds: dict[BuildPhase, float] = {"communicator": 0.0, "state": 0.0, "data": 0.0}

    def end(self, phase: BuildPhase) -> None:
        """Add the time since the last call to `phase`. Call at the end of each part of it."""
        now = time.monotonic()
        self.seconds[phase] += now - self._last_end
        self._last_end = now

    def to_ready_record(self, rank: int) -> dict[str, Any]:
        """Return the record that tells the driver that the state of a rank is complete, and how long that took."""
        return {"type": "ready", "rank": rank, "unix": time.time(), "durations": dict(self.seconds)}
