"""The rendezvous of a generation's ranks, as plain data that the driver shares."""

from __future__ import annotations

from dataclasses import dataclass

DECISION_KEY = "decided"  # key in the store, set once per generation, to FORMED or ABORTED
FORMED, ABORTED = "formed", "aborted"


@dataclass(frozen=True)
class Rendezvous:
    """The address of the driver's TCPStore. `generation` selects a key prefix, so generations do not share keys."""

    host: str
    port: int
    generation: int
    timeout_s: float
