"""Early stopping: end training when a metric has not improved for some evaluations."""

from __future__ import annotations

from raytrain_hpc.callbacks.best_metric import MetricCallback, Mode
from raytrain_hpc.errors import CallbackError


class EarlyStopping(MetricCallback):
    """End of training when `metric` has not improved by more than `min_delta` in `patience` values in a row.

    A metric that starts with "val/" has a value at every evaluation, others at every step. The run saves its last step
    and is done; the same command does not train further. Combine it with KeepBest to keep the best checkpoint.
    """

    def __init__(self, metric: str = "val/loss", *, patience: int = 3, min_delta: float = 0.0, mode: Mode = "min"):
        """Initialize. Raises CallbackError if `patience` is below 1."""
        if patience < 1:
            raise CallbackError(f"patience={patience}: needs at least 1")
        super().__init__(metric, mode, min_delta)
        self._patience = patience

    def pre_train(self) -> None:
        """Stop at once if the run had ended in this way."""
        if self.best.num_worse >= self._patience:
            self.control.stop()

    def on_value(self, is_best: bool) -> None:
        """Stop after `patience` values that were no better."""
        if self.best.num_worse < self._patience:
            return
        if self.context.is_main_process:
            self.context.log(
                f"early stopping: {self.metric} has not improved on {self.best.best} in {self._patience} values"
            )
        self.control.stop()
