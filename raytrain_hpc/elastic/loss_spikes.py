"""Which loss is out of the ordinary? Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from statistics import fmean, pstdev

WINDOW = 128  # steps that are remembered
_MIN_LOSSES = 32  # of them, until anything is said
_MIN_RELATIVE_DEVIATION = 1e-3  # of the mean: a curve that hardly moves is no reason to call its next point a spike


def compute_spike_threshold(recent_losses: Sequence[float], deviations: float) -> float:
    """The loss above which a step is a spike: this many standard deviations above the mean of the recent ones.

    Infinite where `deviations` is 0, and as long as too few are known. Losses that are not finite do not count.
    """
    known = [loss for loss in recent_losses if isfinite(loss)]
    if not deviations or len(known) < _MIN_LOSSES:
        return inf
    mean = fmean(known)
    return mean + deviations * max(pstdev(known, mean), _MIN_RELATIVE_DEVIATION * abs(mean))
