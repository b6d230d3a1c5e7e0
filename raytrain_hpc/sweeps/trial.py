"""A trial of a sweep: its settings, its run directory, how it ended, and what its metrics say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from typing import Any, Literal

from raytrain_hpc.config.loader import parse_override
from raytrain_hpc.config.value_types import convert_value, get_type
from raytrain_hpc.errors import RunDirectoryError
from raytrain_hpc.run_report.run_reader import read_run
from raytrain_hpc.storage.location import Location, parse_location

Mode = Literal["min", "max"]
State = Literal["running", "done", "stopped early", "interrupted", "failed"]
COLUMNS = ("loss", "validation", "tokens/s", "mfu", "GiB", "seconds")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `settings`: its overrides of the common settings, as `key=value`.

    `value` is that of the metric that the sweep optimizes, and `step` the last step that has one; None without one.
    `state`: running, done, stopped early (by `stop_bad`), interrupted or failed. A trial that was recorded as running
    and has no process is to be continued, like an interrupted one.
    """

    number: int
    settings: tuple[str, ...]
    run_dir: Location
    state: State = "running"
    exit_code: int | None = None
    value: float | None = None
    step: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the trial needs no further training: it is done, or was stopped early."""
        return self.state in ("done", "stopped early")

    @property
    def has_run(self) -> bool:
        """Whether the run has begun. Raises RunDirectoryError if an object store does not answer."""
        try:
            return (self.run_dir / "config.yaml").is_file()
        except OSError as error:
            raise RunDirectoryError(f"{self.run_dir}: cannot be read: {error.strerror}") from error

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of the keys that the sweep varies."""
        return {key: _convert(key, value) for key, value, _ in map(parse_override, self.settings)}

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.run_dir.name

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        fields = {name: getattr(self, name) for name in ("number", "state", "exit_code", "value", "step")}
        return {"settings": list(self.settings), "run_dir": str(self.run_dir), **fields}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Trial:
        """Return the trial that `to_json` was called on. Other keys are ignored."""
        values = {name: content[name] for name in ("number", "state", "exit_code", "value", "step")}
        return cls(settings=tuple(content["settings"]), run_dir=parse_location(content["run_dir"]), **values)

    def read_columns(self) -> dict[str, float | None]:
        """Read the values of the table from the run directory, by column; None where a value is missing."""
        if not self.has_run:
            return dict.fromkeys(COLUMNS)
        run = read_run(self.run_dir)
        rates = sorted(rate for _, rate in run.get_points("throughput/tokens_per_sec"))
        last, result = run.last_metrics, run.result
        values = (
            last.get("train/loss"),
            result.get("val/loss"),
            rates[len(rates) // 2] if rates else None,
            last.get("throughput/mfu"),
            max((peak for _, peak in run.get_points("memory/peak_gib")), default=None),
            result.get("wall_s"),
        )
        return dict(zip(COLUMNS, values, strict=True))

    def read_points(self, metric: str) -> dict[int, float]:
        """Read step -> value of a metric from the run directory; finite values only."""
        return {int(step): value for step, value in read_run(self.run_dir).get_points(metric)} if self.has_run else {}

    def measure(self, metric: str) -> Trial:
        """Return this trial with its value of a metric, and the last step that has one."""
        points = self.read_points(metric)
        return replace(self, value=summarize_points(metric, points), step=max(points, default=None))


def _convert(key: str, value: Any) -> Any:
    """Return the value of a key, as in a config; a value that leaves a choice to the planner unchanged."""
    try:
        return convert_value(value, get_type(key))
    except ValueError:
        return value


def summarize_points(metric: str, points: Mapping[int, float]) -> float | None:
    """Return the value of a run from those of its steps; None without any.

    It is the last value of a validation metric, and otherwise the median over the last tenth of the steps, since the
    values of single steps are noisy.
    """
    values = [points[step] for step in sorted(points) if isfinite(points[step])]
    if not values:
        return None
    return values[-1] if metric.startswith("val/") else median(values[-max(1, len(values) // 10) :])


def is_better(value: float, other: float, mode: Mode) -> bool:
    """Return whether `value` is strictly better than `other`."""
    return value < other if mode == "min" else value > other
