"""Goodput: the best checkpoint interval, and the share of time that becomes progress on devices that fail."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

# Llama 3 405B: 419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv 2407.21783, table 5).
DEVICE_HOURS_PER_FAILURE = 50_000.0

COPY_BYTES_PER_S = 5e9  # of a rank's state into host memory, for which a checkpoint blocks training


@dataclass(frozen=True)
class Goodput:
    """Expected goodput. Fields are seconds, or shares of the time.

    `between_failures_s`: mean time between failures of the whole run. `save_every_s`: best checkpoint interval.
    `from_checkpoints`: share of time that becomes progress if every failure restarts from a checkpoint. `in_memory`:
    the same if every failure is recovered from memory.
    """

    between_failures_s: float
    save_every_s: float
    from_checkpoints: float
    in_memory: float


def estimate_goodput(
    devices: int, *, save_s: float, restart_s: float, pause_s: float, device_hours: float = DEVICE_HOURS_PER_FAILURE
) -> Goodput:
    """Estimate the goodput of a run on `devices` devices, each of which fails once per `device_hours`.

    `save_s`: seconds for which a checkpoint blocks training. `restart_s`: seconds from a failure to the first step if
    all processes restart. `pause_s`: the same if the remaining ranks recover in memory; checkpoints are then a second
    line of defense, at the same interval.

    Young 1974: the best interval is sqrt(2 C M), with C the cost of a checkpoint and M the mean time between failures.
    Each interval costs C, and each failure half an interval and the restart. Daly 2006 notes that this holds for C well
    below M; otherwise the interval is M. Shares are at least 0.
    """
    mtbf_s = device_hours * 3600 / devices
    interval_s = min(sqrt(2 * save_s * mtbf_s), mtbf_s)
    save_share = save_s / interval_s if interval_s else 0.0
    lost_share = (interval_s / 2 + restart_s) / mtbf_s
    return Goodput(
        mtbf_s, interval_s, max(0.0, 1 - save_share - lost_share), max(0.0, 1 - save_share - pause_s / mtbf_s)
    )
