"""The files of a run directory: what each is called, and how it is written so that a reader never sees half of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raytrain_hpc.config import Config
from raytrain_hpc.config_files import write_config


class RunDirectory:
    """`run.dir`, by the names of its files."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.incidents = path / "incidents.jsonl"
        self.checkpoints = path / "checkpoints"
        self.config = path / "config.yaml"
        self.tokenizer = path / "tokenizer.json"
        self.tensorboard = path / "tb"
        self.result = path / "result.json"

    def write_start(self, config: Config, plan: dict[str, Any], tokenizer: dict[str, Any] | None) -> None:
        """What the run is about to do."""
        write_config(config, self.config)
        self._replace("plan.json", plan)
        if tokenizer is not None:
            self._replace("tokenizer.json", tokenizer)

    def write_workers(self, generation: int, workers: list[dict[str, Any]]) -> None:
        """The generation now running."""
        self._replace("workers.json", {"generation": generation, "workers": workers})

    def write_result(self, result: dict[str, Any]) -> None:
        """How the run ended."""
        self._replace("result.json", result)

    def append_incident(self, incident: dict[str, Any]) -> None:
        """One line of incidents.jsonl."""
        with self.incidents.open("a") as file:
            file.write(json.dumps(incident) + "\n")

    def committed_metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl in file order. A last line cut short by a kill is left out."""
        if not self.metrics.exists():
            return
        with self.metrics.open() as file:
            for line in file:
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue

    def _replace(self, name: str, content: object) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(temporary, self.path / name)
