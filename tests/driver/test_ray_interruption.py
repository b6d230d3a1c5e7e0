"""One run through the real command line, two workers: SIGKILL, Ctrl-C to the group, SIGTERM."""

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

from tests.driver.cli_process import TIMEOUT_S, count, curve, until
from tests.driver.test_ray_faults import STEPS, WORDS, config, gone, pids
from tests.warm_pool import SMALL_OVERRIDES, WarmPool, get_step_metrics

OURS = "RAYTRAIN_TEST_OF"


@pytest.fixture
def ray_tmpdir() -> Iterator[str]:
    """Short, for the sockets in it, and this test's own, so that nobody's cluster is found."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield name


def processes_of(mark: str) -> list[int]:
    """Everything that a life has started and that still runs, by an environment variable that all inherit."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{OURS}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError):  # it has ended in the meantime, or is another user's
            continue
    return [pid for pid in found if not gone(pid)]


@contextmanager
def life(run: Path, ray_tmpdir: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "RAY_TMPDIR": ray_tmpdir, OURS: str(run)}
    command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run}", *SMALL_OVERRIDES, *WORDS, *words]
    with (run.parent / "out").open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            yield process
        finally:
            for pid in processes_of(str(run)):
                os.kill(pid, signal.SIGKILL)
            process.wait(TIMEOUT_S)


def generation(run: Path) -> int:
    workers = run / "workers.json"
    return json.loads(workers.read_text())["generation"] if workers.exists() else 0


def reached(run: Path) -> int:
    return json.loads((run / "result.json").read_text())["steps"]


@pytest.mark.timeout(600)
def test_interrupted_again_and_again(ray_cluster: None, pool: WarmPool, tmp_path: Path, ray_tmpdir: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shared = f"cluster.address={ray.get_runtime_context().gcs_address}"
    with life(run, ray_tmpdir, shared) as process:
        until(lambda: any((run / "checkpoints").glob("step-*")), out)
        workers = pids(run)
        process.kill()
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        until(lambda: all(gone(pid) for pid in workers), out, timeout_s=30)

    with life(run, ray_tmpdir, "cluster.address=local") as process:  # takes the lease over at once
        until(lambda: generation(run) == 2 and pids(run) != workers, out)
        before = count(run)
        until(lambda: count(run) > before, out)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does: Ray's own processes get it too
        assert process.wait(TIMEOUT_S) == 3, out.read_text()
        until(lambda: not processes_of(str(run)), out)
    first = reached(run)
    assert f"resumed from {run}/checkpoints/step-" in out.read_text()

    with life(run, ray_tmpdir, shared) as process:
        until(lambda: generation(run) == 3, out)
        before = count(run)
        until(lambda: count(run) > before, out)
        process.terminate()
        assert process.wait(TIMEOUT_S) == 3, out.read_text()
    second = reached(run)
    assert first < second < STEPS and f"resumed from {run}/checkpoints/step-{first:08d}" in out.read_text()
    assert "Traceback" not in out.read_text() and "authentication" not in out.read_text()

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rest = get_step_metrics(pool.train(config(run), resume_step=second)[0])
    by_step = {metrics["step"]: curve(metrics) for metrics in [*lines, *rest]}
    alone = get_step_metrics(pool.train(config(tmp_path / "alone"))[0])
    assert len(alone) == STEPS and by_step == {metrics["step"]: curve(metrics) for metrics in alone}
