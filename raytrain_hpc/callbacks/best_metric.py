"""The best value of a metric so far, and the base of callbacks that follow it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import isnan
from typing import Any, Literal

from raytrain_hpc.callbacks.callback import Callback
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


class MetricCallback(Callback, ABC):
    """Base of callbacks that act on each value of a metric, and whose state is the best one.

    A metric that starts with "val/" has a value at every evaluation, others at every step.
    """

    def __init__(self, metric: str, mode: Mode, min_delta: float = 0.0):
        self.metric, self.best = metric, BestMetric(mode, min_delta)

    @abstractmethod
    def on_value(self, is_best: bool) -> None:
        """Act on a value, which `best` has taken into account. `is_best`: whether it is the best so far."""

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Take a metric of training into account."""
        if not self.metric.startswith("val/"):
            self._update(metrics)

    def post_eval(self, metrics: dict[str, Any]) -> None:
        """Take a metric of validation into account."""
        if self.metric.startswith("val/"):
            self._update(metrics)

    def close(self) -> None:
        """Say so if the metric did not occur: its name may be wrong."""
        if not self.best.was_seen and self.context.is_main_process and self.context.step == self.context.end_step:
            self.context.log(f"alarm: {type(self).__name__}: no step or evaluation had {self.metric!r}")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the count of values since then."""
        return self.best.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best.load_state_dict(state)

    def _update(self, metrics: dict[str, Any]) -> None:
        if self.metric in metrics:
            self.on_value(self.best.update(metrics[self.metric]))
