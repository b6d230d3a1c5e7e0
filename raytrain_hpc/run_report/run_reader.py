"""Content of a run directory as plain data. Files that the run has not written yet give empty values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from raytrain_hpc.driver.run_directory import RunDirectory, check_holds_run, read_json_lines, read_run_directory
from raytrain_hpc.errors import RunDirectoryError
from raytrain_hpc.observability.kernel_summary import KernelSummary
from raytrain_hpc.observability.profiler import KERNELS_SUFFIX
from raytrain_hpc.storage.location import Location

Json = dict[str, Any]


@dataclass(frozen=True)
class StepProfile:
    """Operations of the profiled steps of one rank."""

    rank: int
    first_step: int
    last_step: int
    kernels: KernelSummary


@dataclass(frozen=True)
class RunRecord:
    """Content of a run directory. `metrics` holds one record per committed step, in step order."""

    location: Location
    name: str
    config: Json
    plan: Json
    workers: list[Json]
    preferred_run: str  # another run, which has devices that this one would use
    result: Json
    metrics: list[Json]
    incidents: list[Json]
    versions: dict[str, str]  # of the software that rank 0 ran, by package
    samples: list[Json]  # text written by the model, oldest first
    timeline: tuple[str, str] | None  # file name and SVG of the newest recorded step
    profiles: list[StepProfile]  # by rank, of the ranks that torch's profiler has covered

    def get_points(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric at all steps with a finite value."""
        values = ((line["step"], line.get(key)) for line in self.metrics)
        return [(step, value) for step, value in values if value is not None and isfinite(value)]

    @property
    def last_metrics(self) -> Json:
        """Metrics of the last step; empty before the first."""
        return self.metrics[-1] if self.metrics else {}


def read_run(run: str | Location | RunDirectory) -> RunRecord:
    """Read the directory of a finished or a running run. Raises RunDirectoryError if it is no run directory."""
    directory = run if isinstance(run, RunDirectory) else read_run_directory(run)
    check_holds_run(directory)
    try:
        config = yaml.safe_load(directory.config.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise RunDirectoryError(f"{directory.config}: cannot be read: {' '.join(str(error).split())}") from error
    workers = _read_json(directory.path / "workers.json")
    return RunRecord(
        location=directory.location,
        name=str(config.get("run", {}).get("name") or directory.location.name),
        config=config,
        plan=_read_json(directory.path / "plan.json"),
        workers=workers.get("workers", []),
        preferred_run=workers.get("preferred_run", ""),
        versions=workers.get("versions", {}),
        samples=list(read_json_lines(directory.samples)),
        result=_read_json(directory.result),
        metrics=directory.read_valid_metrics(),
        incidents=directory.read_incidents(),
        timeline=_read_timeline(directory.timeline),
        profiles=_read_profiles(directory.profile),
    )


def _read_json(path: Path) -> Json:
    """Return the object in a JSON file; empty if the file is missing or invalid."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_timeline(directory: Path) -> tuple[str, str] | None:
    svg_files = sorted(directory.glob("step-*.svg")) if directory.is_dir() else []
    return (svg_files[-1].stem, svg_files[-1].read_text()) if svg_files else None


def _read_profiles(directory: Path) -> list[StepProfile]:
    """Return the profiles in a directory, except files that a kill left incomplete."""
    profiles = []
    for path in sorted(directory.glob(f"*{KERNELS_SUFFIX}")):
        content = _read_json(path)
        try:
            steps = int(content["rank"]), int(content["first_step"]), int(content["last_step"])
            profiles.append(StepProfile(*steps, KernelSummary.from_json(content)))
        except (KeyError, TypeError, ValueError):
            continue
    return profiles
