"""`ray job submit -- raytrain-hpc train`: honest status, lines in the log, and a stop that saves within its grace."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs.ray_head import Head, started_head, wait_for

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with started_head() as made:
        yield made


def steps_in(run_dir: Path) -> list[int]:
    metrics = run_dir / "metrics.jsonl"
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_wrong_config_fails_and_the_log_says_why(head: Head, tmp_path: Path) -> None:
    submitted = head.submit("wrong", f"run.dir={tmp_path}/run", "train.lrr=1")
    assert submitted.returncode != 0
    assert head.status("wrong") == "FAILED"
    assert "error: train.lrr=1 (command line): no such key; did you mean train.lr?" in head.logs("wrong")
    assert not (tmp_path / "run").exists()


def test_stop_saves_and_the_next_submission_goes_on(head: Head, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    head.submit("first", f"run.dir={run_dir}", "train.steps=1000000", wait=False)
    wait_for(lambda: len(steps_in(run_dir)) >= 5, "five steps", 90)
    workers = json.loads((run_dir / "workers.json").read_text())["workers"]
    for worker in workers:  # the job's own cluster, not a new one
        assert head.process in psutil.Process(worker["pid"]).parents()
    assert "\nstep 1/1000000  loss " in head.logs("first")  # lines come while it runs

    asked = time.time()
    head.stop("first")
    assert head.status("first") == "STOPPED"
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    reached = int(checkpoint.name.removeprefix("step-"))
    print(f"checkpoint {checkpoint.stat().st_mtime - asked:.2f} s after the stop was asked for")
    assert steps_in(run_dir)[-1] == reached
    # Its last words show that it left by itself, within the grace period.
    assert f"stopped at step {reached} of 1000000; saved in {checkpoint}" in head.logs("first")
    assert json.loads((run_dir / "result.json").read_text())["outcome"] == "stopped"
    assert not any(psutil.pid_exists(worker["pid"]) for worker in workers)

    last = reached + 5
    again = head.submit("second", f"run.dir={run_dir}", f"train.steps={last}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert head.status("second") == "SUCCEEDED"
    log = head.logs("second")
    assert f"resumed from {checkpoint}: step {reached} of {last}" in log
    assert f"\nstep {last}/{last}  loss " in log
    assert f"done: {last} steps" in log
    assert steps_in(run_dir) == list(range(1, last + 1))
