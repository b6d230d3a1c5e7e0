"""How often to save, and which share of the time becomes progress, for a fleet that fails now and then."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

# Llama 3 405B: 419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv 2407.21783, table 5).
DEVICE_HOURS_PER_FAILURE = 50_000.0

COPY_BYTES_PER_S = 5e9  # of a rank's state into host memory, which is what a checkpoint holds the run up for


@dataclass(frozen=True)
class Goodput:
    """What to expect. Seconds, and shares of the time.

    `between_failures_s`: of the whole run. `save_every_s`: the best time between checkpoints. `from_checkpoints`: the
    share of time that becomes progress where every failure goes back to one, `in_memory`: where it costs `pause_s`.
    """

    between_failures_s: float
    save_every_s: float
    from_checkpoints: float
    in_memory: float


def estimate_goodput(
    devices: int, *, save_s: float, restart_s: float, pause_s: float, device_hours: float = DEVICE_HOURS_PER_FAILURE
) -> Goodput:
    """Expected for `devices`, one of which fails every `device_hours`.

    `save_s`: what a checkpoint holds the run up; `restart_s`: from a failure to the first step where all start again;
    `pause_s`: where those that are left go on in memory. Checkpoints then are a second line, as often as without.

    Young 1974: the best interval between checkpoints is sqrt(2 C M) with C their cost and M the mean time between
    failures; each interval then pays C, and each failure half an interval and the restart. As Daly 2006 notes that
    holds for C well below M; where it is not, the interval is M, and no share is below 0.
    """
    between = device_hours * 3600 / devices
    every = min(sqrt(2 * save_s * between), between)
    saving = save_s / every if every else 0.0
    lost = (every / 2 + restart_s) / between
    return Goodput(between, every, max(0.0, 1 - saving - lost), max(0.0, 1 - saving - pause_s / between))
