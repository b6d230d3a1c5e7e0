"""Result of a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_hpc.storage.location import Location
from raytrain_hpc.sweeps.sweep_table import format_table, sort_trials
from raytrain_hpc.sweeps.trial import Mode, Trial


@dataclass(frozen=True)
class SweepResult:
    """Result of a sweep. `print` shows it as a table, the best trial first."""

    trials: tuple[Trial, ...]
    """All trials, in the order of their numbers."""
    is_complete: bool
    """Whether no trial was interrupted or is missing. Otherwise, the same call continues the sweep."""
    metric: str
    mode: Mode
    report: Location | None = None
    """The HTML report that compares all trials; None if no trial has begun."""

    @property
    def best(self) -> Trial | None:
        """The trial with the best metric among those that have trained all steps; None without any."""
        return next((trial for trial in self.sort() if trial.state == "done"), None)

    def sort(self) -> list[Trial]:
        """Return the trials, best first: those that are done by their value, then the others."""
        return sort_trials(self.trials, self.metric, self.mode)

    def __str__(self) -> str:
        """Return a table of the trials."""
        return "\n".join(format_table(self.sort(), self.metric))
