"""Median stopping rule: which trial is so bad that the rest of its steps would be wasted. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from raytrain_hpc.sweeps.trial import Mode, is_better

MIN_TRIALS = 3  # other trials with a value at the same step, below which no trial is stopped


@dataclass(frozen=True)
class Curve:
    """Values of a metric by step. `is_stopped`: of a trial that was stopped early."""

    points: Mapping[int, float]
    is_stopped: bool = False

    @property
    def reach(self) -> float:
        """The last step with a value; infinite for a stopped trial, see `get_value`."""
        return inf if self.is_stopped and self.points else max(self.points, default=0)

    def get_value(self, step: int) -> float | None:
        """Return the value at a step. That of a stopped trial is its last one from the end of its curve on.

        Otherwise each step would compare the remaining trials with each other alone, and stop half of them again.
        """
        if self.is_stopped and self.points and step > max(self.points):
            return self.points[max(self.points)]
        return self.points.get(step)


@dataclass(frozen=True)
class Comparison:
    """A trial whose best value until `step` is worse than the median of `num_trials` other trials at that step."""

    step: int
    best: float
    median: float
    num_trials: int


def find_worse_than_median(
    points: Mapping[int, float], others: Sequence[Curve], mode: Mode, min_steps: int
) -> Comparison | None:
    """Return why a trial with these values should be stopped now, or None to let it continue.

    The others may still be running: they are compared at the last step that enough of them have reached. The trial is
    compared by its best value so far, as values of single steps are noisy.
    """
    if len(others) < MIN_TRIALS:
        return None
    reached = sorted((other.reach for other in others), reverse=True)[MIN_TRIALS - 1]
    for step in sorted((step for step in points if min_steps <= step <= reached), reverse=True):
        values = [value for other in others if (value := other.get_value(step)) is not None]
        if len(values) >= MIN_TRIALS:
            best = (min if mode == "min" else max)(value for at, value in points.items() if at <= step)
            middle = median(values)
            return Comparison(step, best, middle, len(values)) if is_better(middle, best, mode) else None
    return None
