"""Early stopping: end training when a metric has not improved for some evaluations."""

from __future__ import annotations

from typing import Any

from raytrain_hpc.callbacks.best_metric import BestMetric, Mode
from raytrain_hpc.callbacks.callback import Callback


class EarlyStopping(Callback):
    """End of training when `metric` has not improved by more than `min_delta` in `patience` values in a row.

    A metric that starts with "val/" has a value at every evaluation, others at every step. The run saves its last step
    and is done; the same command does not train further. Combine it with KeepBest to keep the best checkpoint.
    """

    def __init__(self, metric: str = "val/loss", *, patience: int = 3, min_delta: float = 0.0, mode: Mode = "min"):
        self._metric, self._patience = metric, patience
        self._best = BestMetric(mode, min_delta)

    def pre_train(self) -> None:
        """Stop at once if the run had ended in this way."""
        if self._best.num_worse >= self._patience:
            self.control.stop()

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Take a metric of training into account."""
        if not self._metric.startswith("val/"):
            self._update(metrics)

    def post_eval(self, metrics: dict[str, Any]) -> None:
        """Take a metric of validation into account."""
        if self._metric.startswith("val/"):
            self._update(metrics)

    def close(self) -> None:
        """Say so if the metric did not occur: its name may be wrong."""
        if not self._best.was_seen and self.context.is_main_process and self.context.step == self.context.end_step:
            self.context.log(f"alarm: early stopping: no step or evaluation had {self._metric!r}")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the count of values since then."""
        return self._best.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._best.load_state_dict(state)

    def _update(self, metrics: dict[str, Any]) -> None:
        if self._metric not in metrics:
            return
        self._best.update(metrics[self._metric])
        if self._best.num_worse >= self._patience:
            if self.context.is_main_process:
                self.context.log(
                    f"early stopping: {self._metric} has not improved on {self._best.best} in {self._patience} values"
                )
            self.control.stop()
