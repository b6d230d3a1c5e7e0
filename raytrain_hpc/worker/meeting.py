"""Where the ranks of a generation meet, as plain data that the driver has, too."""

from __future__ import annotations

from dataclasses import dataclass

FALLEN = "fallen"  # key of a generation that will not be formed any more


@dataclass(frozen=True)
class Rendezvous:
    """A store that lives with the driver, and a generation's prefix of its own in it."""

    host: str
    port: int
    generation: int
    timeout_s: float
