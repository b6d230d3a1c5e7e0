"""What a machine makes of the work that it is given: the four numbers that are not on any data sheet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log


@dataclass(frozen=True)
class Calibration:
    """`efficiency`: share of the peak that large matrix products reach. `layer_s`: seconds that a layer's forward pass
    takes beside its arithmetic and memory, for launches and gaps. `exchanges_hidden`, `gradients_hidden`: shares of the
    traffic inside passes, and of that of data-parallel ranks, that pass behind what is computed.

    The defaults were fitted, all rows at once, to the fourteen layouts of the Ultrascale playbook (Hugging Face 2025,
    eight H100 per node); tests/planner/test_published_layouts.py holds what they reach there and on other tables.
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
_STEP_SIZES = (0.5, 0.2, 0.05, 0.02)  # by which a number is tried larger and smaller


def refit(
    predict: Callable[[Calibration], Sequence[float]], measured: Sequence[float], initial: Calibration
) -> Calibration:
    """The calibration near `start` with which predictions are nearest to what was measured, by squared ratios.

    `predict`: seconds of each step that was measured. One number after the other goes up or down for as long as that
    helps. Without any measurement `start` is what it is.
    """

    def off(calibration: Calibration) -> float:
        return sum(log(one / other) ** 2 for one, other in zip(predict(calibration), measured, strict=True))

    best, error = initial, off(initial)
    for step in _STEP_SIZES:
        improved = bool(measured)
        while improved:
            improved = False
            for tried in _iter_neighbors(best, step):
                if (now := off(tried)) < error * (1 - 1e-6):
                    best, error, improved = tried, now, True
    return best


def _iter_neighbors(calibration: Calibration, step: float) -> Iterator[Calibration]:
    for name, (low, high) in _BOUNDS.items():
        value = getattr(calibration, name)
        share = high < 1.0 and low == 0.0
        for other in (value + step / 2, value - step / 2) if share else (value * (1 + step), value / (1 + step)):
            yield replace(calibration, **{name: min(high, max(low, other))})
