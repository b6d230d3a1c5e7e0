"""`ray job submit -- raytrain-hpc train`: job status, log lines, and a stop that saves within the grace period."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs.ray_head import Head, start_head, wait_for
from tests.json_lines import read_json_lines

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def head(ray_python: Path) -> Iterator[Head]:
    with start_head(ray_python) as started:
        yield started


def read_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_json_lines(run_dir / "metrics.jsonl")]


def test_wrong_config_fails_and_is_logged(head: Head, tmp_path: Path) -> None:
    submitted = head.submit("wrong", f"run.dir={tmp_path}/run", "optimizer.lrr=1")
    assert submitted.returncode != 0
    assert head.status("wrong") == "FAILED"
    assert "error: optimizer.lrr=1 (command line): no such key; did you mean optimizer.lr?" in head.logs("wrong")
    assert not (tmp_path / "run").exists()


def test_stopped_job_is_resumed_by_the_next_submission(head: Head, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    head.submit("first", f"run.dir={run_dir}", "train.steps=1000000", wait=False)
    wait_for(lambda: len(read_steps(run_dir)) >= 5, "five steps", 90)
    workers = json.loads((run_dir / "workers.json").read_text())["workers"]
    assert {worker["pid"] for worker in workers} <= head.find_workers(), "in the cluster of the job, not in a new one"
    assert "\nstep 1/1000000  loss " in head.logs("first")  # lines appear while the job runs

    stop_time = time.time()
    head.stop("first")
    assert head.status("first") == "STOPPED"
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    reached = int(checkpoint.name.removeprefix("step-"))
    print(f"checkpoint {checkpoint.stat().st_mtime - stop_time:.2f} s after the stop was requested")
    assert read_steps(run_dir)[-1] == reached
    # The last line shows that it ended by itself, within the grace period.
    assert f"stopped at step {reached} of 1000000; saved in {checkpoint}" in head.logs("first")
    assert json.loads((run_dir / "result.json").read_text())["outcome"] == "stopped"
    assert not any(psutil.pid_exists(worker["pid"]) for worker in workers)

    last = reached + 5
    resubmitted = head.submit("second", f"run.dir={run_dir}", f"train.steps={last}")
    assert resubmitted.returncode == 0, resubmitted.stdout + resubmitted.stderr
    assert head.status("second") == "SUCCEEDED"
    log = head.logs("second")
    assert f"resumed from {checkpoint}: step {reached} of {last}" in log
    assert f"\nstep {last}/{last}  loss " in log
    assert f"done: {last} steps" in log
    assert read_steps(run_dir) == list(range(1, last + 1))
