"""A sweep that is killed: its trials save and end by themselves, and the same command continues them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.warm_pool import SMALL_OVERRIDES

STEPS = 200


def list_command(directory: Path) -> list[str]:
    words = [*SMALL_OVERRIDES, f"run.dir={directory}", f"train.steps={STEPS}", "checkpoint.interval=1000"]
    words += ["cluster.workers=0", "cluster.device=cpu", "logging.tensorboard=false", "logging.sample_tokens=0"]
    over = ["--over", "optimizer.lr=1e-3,1e-2", "--at-once", "2"]
    return [sys.executable, "-m", "raytrain_hpc", "sweep", *words, *over]


def run_sweep(directory: Path) -> None:
    done = subprocess.run(list_command(directory), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def read_losses(directory: Path) -> dict[tuple[str, int, str], float]:
    """Return the losses of all trials by trial, step and name; of a step that was trained twice, the last."""
    return {
        (path.parent.name, record["step"], name): record[name]
        for path in directory.glob("*/metrics.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
        for name in ("train/loss", "val/loss")
        if name in record
    }


def read_trials(directory: Path) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = json.loads((directory / "sweep.json").read_text())["trials"]
    return [{key: trial[key] for key in ("settings", "state", "value", "step")} for trial in trials]


def find_processes(text: str) -> list[Path]:
    """Return the processes in /proc whose command lines contain a text."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if text in (process / "cmdline").read_text(errors="replace"):
                found.append(process)
    return found


def test_trials_of_a_killed_sweep_save_and_end_and_the_same_command_continues_them(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_sweep(whole)
    with (tmp_path / "output").open("wb") as output:
        sweep = subprocess.Popen(list_command(killed), stdout=output, stderr=output)
    deadline = time.monotonic() + 120
    while not read_losses(killed):
        assert sweep.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.02)
    sweep.kill()
    sweep.wait()
    deadline = time.monotonic() + 30
    while find_processes(str(killed)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for run_dir in {path.parent for path in killed.glob("*/metrics.jsonl")}:
        (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
        assert 0 < int(checkpoint.name.removeprefix("step-")) < STEPS
    assert [trial["state"] for trial in read_trials(killed)] == ["running", "running"]
    run_sweep(killed)
    assert read_losses(killed) == read_losses(whole)
    assert read_trials(killed) == read_trials(whole)
    assert len(read_losses(whole)) == 2 * STEPS + 2
