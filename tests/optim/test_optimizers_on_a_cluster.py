"""Optimizers of whole runs on Ray: state through a kill of a rank, a resize and a restart."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc import Callback, start, train
from tests.json_lines import read_json_lines
from tests.warm_pool import make_small_config

STEPS = 40
BASE = [f"train.steps={STEPS}", "train.micro_batch_size=2", "train.deterministic=elastic", "checkpoint.interval=0"]
OPTIMIZERS = {"muon": ["optimizer.name=muon"], "class": ["optimizer.name=torch.optim.NAdam"]}


class Delay(Callback):
    """Slow steps down while the file "slow" exists, so that workers can join."""

    def post_step(self, metrics: dict[str, Any]) -> None:
        if (self.context.run_dir / "slow").exists():
            time.sleep(0.6)


def read_curve(directory: Path) -> dict[int, tuple[float, float]]:
    """Return loss and learning rate by step; the last line of a step counts."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["train/loss"], line["train/lr"]) for line in lines}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_curve_is_that_of_an_undisturbed_run(ray_cluster: None, tmp_path: Path, optimizer: str) -> None:
    """Killed at step 6, grown to four workers, stopped, and resumed on two with replicated state."""
    words = [*BASE, *OPTIMIZERS[optimizer]]
    schedule = lambda step: 1 / (1 + step)  # noqa: E731  as in a notebook
    train(make_small_config(tmp_path / "a", *words, "cluster.workers=0"), lr_schedule=schedule, quiet=True)
    directory = tmp_path / "b"
    directory.mkdir()
    (directory / "slow").touch()
    disturbed = ["cluster.workers=3", "parallel.zero=2", "fault.inject=[{kind: kill, rank: 1, step: 6}]"]
    run = start(make_small_config(directory, *words, *disturbed), lr_schedule=schedule, callbacks=[Delay()])
    run.resize(4)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not has_grown(directory):
        time.sleep(0.05)
    run.stop()
    assert run.result(90).outcome == "stopped"
    (directory / "slow").unlink()
    train(make_small_config(directory, *words, "cluster.workers=2"), lr_schedule=schedule, quiet=True)
    assert read_curve(directory) == read_curve(tmp_path / "a")
    assert [json.loads(line)["kind"] for line in (directory / "incidents.jsonl").read_text().splitlines()] == ["died"]


def has_grown(directory: Path) -> bool:
    """Return whether a step after the kill was trained on four workers."""
    lines = read_json_lines(directory / "metrics.jsonl")
    return any(line["step"] > 6 and line["elastic/world_size"] == 4 for line in lines)
