"""The files of a run directory: what each is called, and how it is written so that a reader never sees half of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raytrain_hpc.config.loader import config_to_yaml
from raytrain_hpc.config.schema import Config


class RunDirectory:
    """`run.dir`, by the names of its files. `alarm` is told of what could not be written."""

    def __init__(self, path: Path, alarm: Callable[[str], None] = lambda text: None):
        self.path = path
        self._alarm = alarm
        self.metrics = path / "metrics.jsonl"
        self.incidents = path / "incidents.jsonl"
        self.checkpoints = path / "checkpoints"
        self.config = path / "config.yaml"
        self.tokenizer = path / "tokenizer.json"
        self.tensorboard = path / "tb"
        self.timeline = path / "timeline"
        self.result = path / "result.json"

    def write_start(self, config: Config, plan: dict[str, Any], tokenizer: dict[str, Any] | None) -> None:
        """What the run is about to do."""
        self._write_atomically(self.config, config_to_yaml(config))
        self._write_atomically(self.path / "plan.json", _to_json(plan))
        if tokenizer is not None:
            self._write_atomically(self.tokenizer, _to_json(tokenizer))

    def write_workers(self, generation: int, workers: list[dict[str, Any]]) -> None:
        """The generation now running."""
        self._write_atomically(self.path / "workers.json", _to_json({"generation": generation, "workers": workers}))

    def write_result(self, result: dict[str, Any]) -> None:
        """How the run ended."""
        self._write_atomically(self.result, _to_json(result))

    def read_incidents(self) -> list[str]:
        """The lines of incidents.jsonl."""
        return self.incidents.read_text().splitlines() if self.incidents.exists() else []

    def write_incidents(self, lines: list[str]) -> None:
        """All lines of incidents.jsonl. They are few, and the last one is completed when the run has recovered."""
        self._write_atomically(self.incidents, "".join(f"{line}\n" for line in lines))

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl in file order. A last line cut short by a kill is left out."""
        if not self.metrics.exists():
            return
        with self.metrics.open(errors="replace") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue

    def read_step_metrics(self, step: int) -> dict[str, Any] | None:
        """The line of `step` that counts: the last one."""
        found = None
        for metrics in self.read_metrics():
            found = metrics if metrics["step"] == step else found
        return found

    def _write_atomically(self, path: Path, text: str) -> None:
        """In one step. A disk that refuses leaves the file as it was, and is an alarm: the run is worth more."""
        temporary = self.path / f".{path.name}.tmp"
        try:
            temporary.write_text(text)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._alarm(f"alarm: {path} cannot be written: {error.strerror}; the run goes on")


def _to_json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"
