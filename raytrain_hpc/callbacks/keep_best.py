"""Keep the checkpoint with the best value of a metric."""

from __future__ import annotations

from raytrain_hpc.callbacks.best_metric import MetricCallback, Mode


class KeepBest(MetricCallback):
    """Checkpoint with the best `metric`, saved at the evaluation that finds it and kept under a label.

    `checkpoint.keep` does not count it. `raytrain-hpc generate RUN_DIR --step best` and `export` find it by its label.
    A metric that starts with "val/" has a value at every evaluation, others at every step.
    """

    def __init__(self, metric: str = "val/loss", *, mode: Mode = "min", label: str = "best"):
        super().__init__(metric, mode)
        self._label = label

    def on_value(self, is_best: bool) -> None:
        """Save a step whose value is the best so far."""
        if is_best:
            self.control.save(self._label)
