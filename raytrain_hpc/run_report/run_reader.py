"""A run directory as plain data. What a run has not written, or not yet, is simply not there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import RunDirectoryError

Json = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What the files of a run directory say. `metrics`: the line that counts of every step, in order."""

    path: Path
    name: str
    config: Json
    plan: Json
    workers: list[Json]
    result: Json
    metrics: list[Json]
    incidents: list[Json]
    timeline: tuple[str, str] | None  # of the last step that has one: its file's name, and the picture

    def get_points(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of a metric, where it is known, and a number."""
        found = ((line["step"], line.get(key)) for line in self.metrics)
        return [(step, value) for step, value in found if value is not None and isfinite(value)]

    @property
    def last_metrics(self) -> Json:
        """The last step's metrics; empty before the first."""
        return self.metrics[-1] if self.metrics else {}


def read_run(path: str | Path) -> RunRecord:
    """Read a run directory, also of a run that goes on. Raises RunDirectoryError where it is none."""
    directory = RunDirectory(Path(path).expanduser())
    if not directory.config.exists():
        raise RunDirectoryError(f"{directory.path}: no run directory: it has no config.yaml")
    try:
        config = yaml.safe_load(directory.config.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise RunDirectoryError(f"{directory.config}: cannot be read: {' '.join(str(error).split())}") from error
    steps = {line["step"]: line for line in directory.read_metrics() if "step" in line}
    return RunRecord(
        path=directory.path,
        name=str(config.get("run", {}).get("name") or directory.path.name),
        config=config,
        plan=_read_json(directory.path / "plan.json"),
        workers=_read_json(directory.path / "workers.json").get("workers", []),
        result=_read_json(directory.result),
        metrics=[steps[step] for step in sorted(steps)],
        incidents=[json.loads(line) for line in directory.read_incidents() if line],
        timeline=_read_timeline(directory.timeline),
    )


def _read_json(path: Path) -> Json:
    """A JSON file that is replaced as a whole: it is there, or it is not."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_timeline(directory: Path) -> tuple[str, str] | None:
    pictures = sorted(directory.glob("step-*.svg")) if directory.is_dir() else []
    return (pictures[-1].stem, pictures[-1].read_text()) if pictures else None
