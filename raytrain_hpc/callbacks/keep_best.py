"""Keep the checkpoint with the best value of a metric."""

from __future__ import annotations

from typing import Any

from raytrain_hpc.callbacks.best_metric import BestMetric, Mode
from raytrain_hpc.callbacks.callback import Callback


class KeepBest(Callback):
    """Checkpoint with the best `metric`, saved at the evaluation that finds it and kept under a label.

    `checkpoint.keep` does not count it. `raytrain-hpc generate RUN_DIR --step best` and `export` find it by its label.
    A metric that starts with "val/" has a value at every evaluation, others at every step.
    """

    def __init__(self, metric: str = "val/loss", *, mode: Mode = "min", label: str = "best"):
        self._metric, self._label = metric, label
        self._best = BestMetric(mode)

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
            self.context.log(f"alarm: KeepBest: no step or evaluation had {self._metric!r}")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value."""
        return self._best.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._best.load_state_dict(state)

    def _update(self, metrics: dict[str, Any]) -> None:
        if self._metric in metrics and self._best.update(metrics[self._metric]):
            self.control.save(self._label)
