"""Files of a run directory, local or in an object store, and atomic writes: a reader never sees a partial file."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from raytrain_hpc.config.loader import config_to_yaml
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.metrics_search import find_last_line_of_step
from raytrain_hpc.errors import RunDirectoryError
from raytrain_hpc.observability.profiler import PROFILE_DIR
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.storage.location import Location, is_url, parse_location
from raytrain_hpc.storage.object_path import ObjectPath
from raytrain_hpc.storage.working_copy import WorkingCopy, get_working_directory


class RunDirectory:
    """The directory `run.dir`, with the local paths of its files. `alarm` is called with each failure to write.

    If it is in an object store, the local files are a working copy: `open_run_directory` fills it, and changes are
    uploaded by `keep_uploaded` and `upload`. Checkpoints are not part of it.

    config.yaml      all settings, resolved
    plan.json        layout, microbatches, number of parameters, estimated memory and step time, unix time of this start
    workers.json     the current generation: versions that rank 0 runs; host, device and coordinates of each rank;
                     another run that has devices of this one
    metrics.jsonl    metrics of each committed step (observability/metrics.py)
    incidents.jsonl  failures and what they cost (driver/incident_log.py)
    samples.jsonl    text sampled from checkpoints: step, prompt, answer
    profile/         traces and summaries of profiled steps (observability/profiler.py)
    result.json      the result (driver/result.py), of a start that has ended
    """

    def __init__(
        self, location: Location, alarm: Callable[[str], None] = lambda text: None, working_path: Path | None = None
    ):
        """Initialize without reading. `working_path`: of the working copy; default: that of this process's run."""
        self.location = location
        self.path = path = working_path or get_working_directory(location)
        self._alarm = alarm
        self.working_copy = WorkingCopy(location, path, alarm) if isinstance(location, ObjectPath) else None
        self.metrics = path / "metrics.jsonl"
        self.incidents = path / "incidents.jsonl"
        self.checkpoints = location / "checkpoints"
        self.config = path / "config.yaml"
        self.tokenizer = path / "tokenizer.json"
        self.tensorboard = path / "tb"
        self.timeline = path / "timeline"
        self.profile = path / PROFILE_DIR
        self.samples = path / "samples.jsonl"
        self.result = path / "result.json"

    def upload(self) -> None:
        """Upload all changes, if the directory is in an object store. Raises OSError."""
        if self.working_copy is not None:
            self.working_copy.upload()

    def keep_uploaded(self) -> AbstractContextManager[None]:
        """Upload changes in the background while the context is active, and the last ones at its end."""
        return contextlib.nullcontext() if self.working_copy is None else self.working_copy.upload_in_background()

    def write_start(self, config: Config, plan: dict[str, Any], tokenizer: dict[str, Any] | None) -> None:
        """Write the settings, the plan and the tokenizer, and remove the result of an earlier start.

        Call when this start trains: until then, the files describe the earlier one.
        """
        self._remove_result()
        self._write_atomically(self.config, config_to_yaml(config))
        self._write_atomically(self.path / "plan.json", _to_json(plan))
        if tokenizer is not None:
            self._write_atomically(self.tokenizer, _to_json(tokenizer))

    def write_workers(
        self, generation: int, layout: Layout, infos: Sequence[dict[str, Any]], preferred_run: str = ""
    ) -> None:
        """Write the workers of a generation, from the host facts of its ranks. The versions are those of rank 0.

        `preferred_run`: another run that has devices which this one would use.
        """
        keys = ("rank", "pid", "node", "node_id", "host", "cpu", "device", "memory_gib")
        workers = [
            {key: info[key] for key in keys} | {"coordinates": layout.get_coordinates(info["rank"])} for info in infos
        ]
        content = {"generation": generation, "versions": infos[0]["versions"], "preferred_run": preferred_run}
        content |= {"workers": workers}
        self._write_atomically(self.path / "workers.json", _to_json(content))

    def append_sample(self, step: int, prompt: str, answer: str) -> None:
        """Append text that the model of `step` wrote after `prompt` to samples.jsonl, unless it is there already.

        Raises OSError if the file cannot be read or written.
        """
        line = json.dumps({"step": step, "prompt": prompt, "answer": answer})
        if not self.samples.exists() or line not in self.samples.read_text().splitlines():
            with self.samples.open("a") as file:
                file.write(f"{line}\n")

    def write_result(self, result: dict[str, Any]) -> None:
        """Write the result of the run."""
        self._write_atomically(self.result, _to_json(result))

    def _remove_result(self) -> None:
        try:
            if self.working_copy is not None:
                self.working_copy.remove(self.result.name)
            else:
                self.result.unlink(missing_ok=True)
        except OSError as error:
            self._alarm(f"alarm: {self.result} cannot be removed: {error.strerror}; the run continues")

    def read_incidents(self) -> list[dict[str, Any]]:
        """Return the incidents in incidents.jsonl, except damaged lines."""
        return list(read_json_lines(self.incidents))

    def write_incidents(self, lines: list[str]) -> None:
        """Write all lines of incidents.jsonl. They are few, and the last one changes when the run has recovered."""
        self._write_atomically(self.incidents, "".join(f"{line}\n" for line in lines))

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl in file order, except lines that a kill left incomplete."""
        return (metrics for metrics in read_json_lines(self.metrics) if "step" in metrics)

    def read_valid_metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each step that led to the current one, in step order.

        A line of a step that was recorded before replaces it and all later ones: the run went back.
        """
        valid: list[dict[str, Any]] = []
        for metrics in self.read_metrics():
            while valid and valid[-1]["step"] >= metrics["step"]:
                valid.pop()
            valid.append(metrics)
        return valid

    def read_step_metrics(self, step: int) -> dict[str, Any] | None:
        """Return the last line of `step` in metrics.jsonl, which is the valid one, or None."""
        return find_last_line_of_step(self.metrics, step)

    def _write_atomically(self, path: Path, text: str) -> None:
        """Replace a file in one step. A failed write keeps the old file and raises an alarm; the run continues."""
        temporary = self.path / f".{path.name}.tmp"
        try:
            temporary.write_text(text)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._alarm(f"alarm: {path} cannot be written: {error.strerror}; the run continues")


def open_run_directory(run_dir: str | Path, alarm: Callable[[str], None]) -> RunDirectory:
    """Return the run directory of a driver; from an object store, its files are downloaded first.

    Raises RunDirectoryError if the URL is not valid or the store does not answer.
    """
    return _download(run_dir, alarm, None)


def read_run_directory(run_dir: str | Location) -> RunDirectory:
    """Return any run directory, of which files from an object store are downloaded to a directory of their own.

    That is removed with the result. Raises as `open_run_directory` does.
    """
    run_dir = str(run_dir)
    if not is_url(run_dir):
        return _download(run_dir, lambda text: None, None)
    working_path = Path(tempfile.mkdtemp(prefix="raytrain-read-"))
    try:
        directory = _download(run_dir, lambda text: None, working_path)
    except BaseException:
        shutil.rmtree(working_path, ignore_errors=True)
        raise
    weakref.finalize(directory, shutil.rmtree, working_path, ignore_errors=True)
    return directory


def _download(run_dir: str | Path, alarm: Callable[[str], None], working_path: Path | None) -> RunDirectory:
    try:
        directory = RunDirectory(parse_location(run_dir), alarm, working_path)
        if directory.working_copy is not None:
            directory.working_copy.download()
    except ValueError as error:
        raise RunDirectoryError(f"{run_dir}: {error}") from error
    except OSError as error:
        raise RunDirectoryError(f"{run_dir}: cannot be read: {error.strerror}") from error
    return directory


def check_holds_run(directory: RunDirectory) -> None:
    """Raise RunDirectoryError, with what the directory is instead, if no run has written its settings there."""
    if directory.config.exists():
        return
    location = directory.location
    if isinstance(location, Path) and not location.exists():
        problem = "no such run directory; give the run.dir of a run"
    elif (location / "sweep.json").is_file():
        problem = "a sweep, not a run; name one of the run directories of its trials, which are in it"
    else:
        problem = "no run directory, as it has no config.yaml; give the run.dir of a run"
    raise RunDirectoryError(f"{location}: {problem}")


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file, one per line, except damaged lines. A file that does not exist has none."""
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        for line in file:
            try:
                content = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(content, dict):
                yield content


def _to_json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"
