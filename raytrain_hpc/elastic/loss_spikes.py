"""Loss spikes: decide from recent losses which loss is an outlier. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from statistics import fmean, pstdev

WINDOW = 128  # recent losses to keep
_MIN_LOSSES = 32  # finite losses needed before any loss counts as a spike
_MIN_RELATIVE_DEVIATION = 1e-3  # of the mean; keeps a flat loss curve from turning noise into spikes


def compute_spike_threshold(recent_losses: Sequence[float], deviations: float) -> float:
    """Return the loss above which a step is a spike: `deviations` standard deviations above the recent mean.

    Losses that are not finite are ignored. Infinite, so that no loss is a spike, if `deviations` is 0 or if fewer than
    32 finite losses are known. The standard deviation is taken to be at least 0.1 % of the mean.
    """
    finite_losses = [loss for loss in recent_losses if isfinite(loss)]
    if not deviations or len(finite_losses) < _MIN_LOSSES:
        return inf
    mean = fmean(finite_losses)
    return mean + deviations * max(pstdev(finite_losses, mean), _MIN_RELATIVE_DEVIATION * abs(mean))
