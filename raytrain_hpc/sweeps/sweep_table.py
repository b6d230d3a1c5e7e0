"""Comparison of the trials of a sweep: their order, the table on the console, and one HTML report."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_hpc.run_report.writer import report
from raytrain_hpc.storage.location import Location
from raytrain_hpc.sweeps.trial import COLUMNS, Mode, State, Trial

_ORDER: tuple[State, ...] = ("done", "stopped early", "interrupted", "running", "failed")
_LOSS = "val/loss"


def sort_trials(trials: Sequence[Trial], metric: str = _LOSS, mode: Mode = "min") -> list[Trial]:
    """Return the trials, best first: those that are done by their value, then the others.

    A dataset may have no validation split: runs without `val/loss` are ordered by their training loss.
    """

    def get_key(trial: Trial) -> tuple[int, bool, float]:
        value = trial.value
        if value is None and metric == _LOSS:
            value = trial.read_columns()["loss"]
        return _ORDER.index(trial.state), value is None, (value or 0.0) * (1 if mode == "min" else -1)

    return sorted(trials, key=get_key)


def format_table(trials: Sequence[Trial], metric: str = _LOSS) -> list[str]:
    """Format the trials as a table, in their order. A metric other than val/loss has a column of its own."""
    extra = () if metric == _LOSS else (metric,)
    cells = [["run", *extra, *COLUMNS]]
    for trial in trials:
        columns = trial.read_columns()
        values = [*(trial.value for _ in extra), *(columns[name] for name in COLUMNS)]
        cells.append([describe_trial(trial), *("-" if value is None else f"{value:.5g}" for value in values)])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def describe_trial(trial: Trial) -> str:
    """Return the settings of a trial, with numbers rounded, and how it ended unless it is done."""
    settings = " ".join(_round_number(setting) for setting in trial.settings)
    ending = {
        "done": "",
        "stopped early": f" (stopped early at step {trial.step})",
        "failed": f" (exit code {trial.exit_code})",
    }
    return settings + ending.get(trial.state, " (interrupted)")


def _round_number(setting: str) -> str:
    """Return a setting with a fraction of at most 4 digits, if a search has chosen more."""
    key, _, value = setting.partition("=")
    if len(value) <= 8 or value.isdigit():
        return setting
    try:
        return f"{key}={float(value):.4g}"
    except ValueError:
        return setting


def write_report(trials: Sequence[Trial], directory: Location) -> Location | None:
    """Write the report that compares all trials with a run directory, and return its location; None without any."""
    run_dirs = [trial.run_dir for trial in trials if trial.has_run]
    return report(run_dirs, directory / "report.html") if run_dirs else None
