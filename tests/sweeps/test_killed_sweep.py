"""A sweep that is killed: its trials save and end by themselves, and the same command continues them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import raytrain_hpc as rt
from tests.driver.cli_process import CliRunner, wait_until
from tests.warm_pool import SMALL_OVERRIDES, make_small_config

STEPS, RATES = 200, ("1e-3", "1e-2")
IN_PROCESS = [f"train.steps={STEPS}", "checkpoint.interval=1000", "cluster.workers=0", "cluster.device=cpu"]


def list_command(directory: Path) -> list[str]:
    over = ["--over", f"optimizer.lr={','.join(RATES)}", "--at-once", "2"]
    return ["sweep", *SMALL_OVERRIDES, *IN_PROCESS, f"run.dir={directory}", *over]


def train_trials(directory: Path) -> list[dict[str, Any]]:
    """Train each trial by itself, without a sweep, and return what a sweep writes about them."""
    trials = []
    for rate in RATES:
        run_dir = directory / f"optimizer.lr={rate}"
        result = rt.train(make_small_config(run_dir, *IN_PROCESS, f"optimizer.lr={rate}"), quiet=True)
        trial = {"settings": [f"optimizer.lr={rate}"], "state": "done", "value": result.val_loss, "step": STEPS}
        trials.append(trial)
    return trials


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


def test_trials_of_a_killed_sweep_save_and_end_and_the_same_command_continues_them(
    cli: CliRunner, tmp_path: Path
) -> None:
    whole, killed, output = tmp_path / "whole", tmp_path / "killed", tmp_path / "output"
    sweep = cli.start(output, *list_command(killed))
    wait_until(lambda: bool(read_losses(killed)), output)
    os.kill(sweep.pid, signal.SIGKILL)
    assert sweep.wait() == -signal.SIGKILL
    wait_until(lambda: not find_processes(str(killed)), output, timeout_s=30)
    for run_dir in {path.parent for path in killed.glob("*/metrics.jsonl")}:
        (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
        assert 0 < int(checkpoint.name.removeprefix("step-")) < STEPS
    assert [trial["state"] for trial in read_trials(killed)] == ["running", "running"]
    code, printed = cli.run(output, *list_command(killed))
    assert code == 0, printed
    assert read_trials(killed) == train_trials(whole)
    assert read_losses(killed) == read_losses(whole)
    assert len(read_losses(whole)) == 2 * STEPS + 2
