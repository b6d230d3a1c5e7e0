"""The best value of a metric so far."""

from __future__ import annotations

from math import isnan
from typing import Any, Literal

from raytrain_hpc.errors import CallbackError

Mode = Literal["min", "max"]


class BestMetric:
    """The best value of a metric, and how many values in a row were no better.

    A value is better if it is less (mode "min") or more (mode "max") than the best one by more than `min_delta`. A NaN
    is never better.
    """

    def __init__(self, mode: Mode, min_delta: float = 0.0):
        if mode not in ("min", "max"):
            raise CallbackError(f"mode={mode!r}: known are min and max")
        self._sign, self._min_delta = (1.0 if mode == "min" else -1.0), min_delta
        self.best: float | None = None
        self.num_worse = 0
        self.was_seen = False

    def update(self, value: float) -> bool:
        """Take a value into account; return whether it is the best so far."""
        self.was_seen = True
        is_better = not isnan(value) and (
            self.best is None or self._sign * value < self._sign * self.best - self._min_delta
        )
        if is_better:
            self.best = value
        self.num_worse = 0 if is_better else self.num_worse + 1
        return is_better

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the count."""
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.num_worse = state["best"], state["num_worse"]
