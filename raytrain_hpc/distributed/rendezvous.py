"""Where the ranks of a generation meet, as plain data that the driver has, too."""

from __future__ import annotations

from dataclasses import dataclass

DECISION_KEY = "decided"  # key that says which of the two a generation is: all are there, or it will not be formed
FORMED, ABORTED = "formed", "fallen"


@dataclass(frozen=True)
class Rendezvous:
    """A store that lives with the driver, and a generation's prefix of its own in it."""

    host: str
    port: int
    generation: int
    timeout_s: float
