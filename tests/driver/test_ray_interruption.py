"""Runs through the real command line on two workers: SIGKILL, Ctrl-C to the process group, SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from tests.driver.cli_process import TIMEOUT_S, count_steps, curve_point, wait_until
from tests.driver.test_ray_faults import STEPS, WORDS, has_exited, make_config, read_pids
from tests.warm_pool import SMALL_OVERRIDES, WarmPool, get_step_metrics

MARKER = "RAYTRAIN_TEST_OF"


@pytest.fixture
def ray_tmpdir() -> Iterator[str]:
    """Return a short directory (for socket paths) that only this test uses, so that it finds no other cluster."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield name


def find_processes(marker: str) -> list[int]:
    """Return the running processes of a run, found by an environment variable that all of them inherit."""
    running = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARKER}={marker}".encode() in (entry / "environ").read_bytes():
                running.append(int(entry.name))
        except (OSError, ValueError):  # it has ended, or belongs to another user
            continue
    return [pid for pid in running if not has_exited(pid)]


@contextmanager
def start_run(run: Path, ray_tmpdir: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "RAY_TMPDIR": ray_tmpdir, MARKER: str(run)}
    command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run}", *SMALL_OVERRIDES, *WORDS, *words]
    with (run.parent / "out").open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            yield process
        finally:
            for pid in find_processes(str(run)):
                os.kill(pid, signal.SIGKILL)
            process.wait(TIMEOUT_S)


def read_generation(run: Path) -> int:
    workers = run / "workers.json"
    return json.loads(workers.read_text())["generation"] if workers.exists() else 0


def read_last_step(run: Path) -> int:
    return json.loads((run / "result.json").read_text())["steps"]


@pytest.mark.timeout(600)
def test_repeated_interruptions(ray_cluster: None, pool: WarmPool, tmp_path: Path, ray_tmpdir: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shared = f"cluster.address={ray.get_runtime_context().gcs_address}"
    with start_run(run, ray_tmpdir, shared) as process:
        wait_until(lambda: any((run / "checkpoints").glob("step-*")), out)
        workers = read_pids(run)
        process.kill()
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        wait_until(lambda: all(has_exited(pid) for pid in workers), out, timeout_s=30)

    with start_run(run, ray_tmpdir, "cluster.address=local") as process:  # takes over the lease at once
        wait_until(lambda: read_generation(run) == 2 and read_pids(run) != workers, out)
        before = count_steps(run)
        wait_until(lambda: count_steps(run) > before, out)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: Ray's processes receive it too
        assert process.wait(TIMEOUT_S) == 3, out.read_text()
        wait_until(lambda: not find_processes(str(run)), out)
    first = read_last_step(run)
    assert f"resumed from {run}/checkpoints/step-" in out.read_text()

    with start_run(run, ray_tmpdir, shared) as process:
        wait_until(lambda: read_generation(run) == 3, out)
        before = count_steps(run)
        wait_until(lambda: count_steps(run) > before, out)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 3, out.read_text()
    second = read_last_step(run)
    assert first < second < STEPS and f"resumed from {run}/checkpoints/step-{first:08d}" in out.read_text()
    assert "Traceback" not in out.read_text() and "authentication" not in out.read_text()

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    resumed = get_step_metrics(pool.train(make_config(run), resume_step=second)[0])
    by_step = {metrics["step"]: curve_point(metrics) for metrics in [*lines, *resumed]}
    uninterrupted = get_step_metrics(pool.train(make_config(tmp_path / "alone"))[0])
    assert len(uninterrupted) == STEPS and by_step == {
        metrics["step"]: curve_point(metrics) for metrics in uninterrupted
    }


@pytest.mark.timeout(300)
def test_sigterm_to_all_processes_of_a_run_stops_it_with_its_state_saved(tmp_path: Path, ray_tmpdir: str) -> None:
    """A batch system sends it to all, processes of Ray included, and the workers are in process groups of their own."""
    run, out = tmp_path / "run", tmp_path / "out"
    with start_run(run, ray_tmpdir, "cluster.address=local", "train.steps=100000") as process:
        wait_until(lambda: count_steps(run) > 0, out)
        for pid in find_processes(str(run)):
            os.kill(pid, signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 3, out.read_text()
        wait_until(lambda: not find_processes(str(run)), out, timeout_s=15)
    last_step = read_last_step(run)
    assert f"stopped at step {last_step} of 100000; saved in {run}/checkpoints/step-{last_step:08d}" in out.read_text()
    assert not (run / "incidents.jsonl").exists() or not (run / "incidents.jsonl").read_text(), "no worker was lost"
