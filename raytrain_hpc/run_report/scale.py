"""Scales of charts: ticks, axis limits, number formats, and shortening of long series. scale.js computes the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]

_CLIP_RATIO = 2.5  # values are clipped if the largest exceeds the 95th percentile by this factor
_CLIP_MARGIN = 1.5  # upper limit of a clipped axis, relative to the 95th percentile
_MIN_VALUES_TO_CLIP = 8


@dataclass(frozen=True)
class Scale:
    """Linear map from values [low, high] to SVG coordinates [start, stop]."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        span = self.high - self.low
        return self.start + (self.stop - self.start) * ((value - self.low) / span if span else 0.5)


def compute_ticks(low: float, high: float, target_count: int) -> list[float]:
    """Return round numbers that cover [low, high]. Their distance is 1, 2 or 5 times a power of ten."""
    if high <= low:
        margin = abs(low) / 2 or 0.5
        low, high = low - margin, high + margin
    min_step = (high - low) / target_count
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= min_step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def compute_clip_limit(values: Sequence[float], min_limit: float) -> float | None:
    """Return the value at which an axis ends so that a few outliers do not flatten all other values.

    None if there is no such outlier: nothing is far above the 95th percentile. The limit is at least `min_limit`.
    """
    if len(values) < _MIN_VALUES_TO_CLIP:
        return None
    ordered = sorted(values)
    percentile = ordered[int(0.95 * (len(ordered) - 1))]
    limit = max(_CLIP_MARGIN * percentile, min_limit)
    return limit if percentile > 0 and ordered[-1] > max(_CLIP_RATIO * percentile, limit) else None


def downsample(points: Sequence[Point], max_points: int) -> list[Point]:
    """Reduce a line to at most `max_points` points: the lowest and highest of each group of neighbors, and the ends."""
    if len(points) <= max_points:
        return list(points)
    size = math.ceil(2 * len(points) / (max_points - 2))
    selected = [points[0]]
    for start in range(0, len(points), size):
        indices = range(start, min(start + size, len(points)))
        low, high = min(indices, key=lambda i: points[i][1]), max(indices, key=lambda i: points[i][1])
        selected += [points[i] for i in sorted({low, high})]
    return [*selected, points[-1]]


def compute_group_means(points: Sequence[Point], max_points: int) -> list[Point]:
    """Reduce a line to at most `max_points` points: the mean of each group of neighbors, at the group's last x."""
    size = max(1, math.ceil(len(points) / max_points))
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def format_number(value: float) -> str:
    """Format a number with at most 4 significant digits and a unit suffix: 12.5M, 0.003, 2e-06."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if suffix != 'k' else 1e3):.4g}{suffix}"
    return f"{value:.4g}"
