"""Calibration: the four numbers of a machine that no data sheet has, refitted from measured step times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log


@dataclass(frozen=True)
class Calibration:
    """Measured properties of a machine.

    `efficiency`: share of peak FLOPs that large matrix products reach. `layer_s`: seconds per layer forward pass
    besides arithmetic and memory traffic, for kernel launches and gaps. `exchanges_hidden`, `gradients_hidden`: shares
    of the communication inside passes, and of that between data-parallel ranks, that overlap with computation.

    The defaults were fitted jointly to the fourteen layouts of the Ultrascale playbook (Hugging Face 2025, eight H100
    per node). tests/planner/test_published_layouts.py checks their accuracy there and on other published tables.
    """

    efficiency: float = 0.553
    layer_s: float = 1.1e-4
    exchanges_hidden: float = 0.5
    gradients_hidden: float = 0.2


_BOUNDS = {
    "efficiency": (0.01, 1.0),
    "layer_s": (1e-6, 1.0),
    "exchanges_hidden": (0.0, 0.95),
    "gradients_hidden": (0.0, 0.95),
}
_STEP_SIZES = (0.5, 0.2, 0.05, 0.02)  # relative changes tried in both directions


def refit(
    predict: Callable[[Calibration], Sequence[float]], measured: Sequence[float], initial: Calibration
) -> Calibration:
    """Return the calibration near `initial` that minimizes the squared log ratios of predictions to measurements.

    `predict` returns the seconds of each measured step. Coordinate descent: each number is raised or lowered as long as
    that helps. Without measurements, `initial` is returned.
    """

    def compute_error(calibration: Calibration) -> float:
        return sum(
            log(predicted_s / measured_s) ** 2
            for predicted_s, measured_s in zip(predict(calibration), measured, strict=True)
        )

    best, error = initial, compute_error(initial)
    for step_size in _STEP_SIZES:
        improved = bool(measured)
        while improved:
            improved = False
            for candidate in _iter_neighbors(best, step_size):
                if (candidate_error := compute_error(candidate)) < error * (1 - 1e-6):
                    best, error, improved = candidate, candidate_error, True
    return best


def _iter_neighbors(calibration: Calibration, step_size: float) -> Iterator[Calibration]:
    for name, (low, high) in _BOUNDS.items():
        value = getattr(calibration, name)
        is_share = high < 1.0 and low == 0.0
        for neighbor in (
            (value + step_size / 2, value - step_size / 2)
            if is_share
            else (value * (1 + step_size), value / (1 + step_size))
        ):
            yield replace(calibration, **{name: min(high, max(low, neighbor))})
