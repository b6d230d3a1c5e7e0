"""Faults of workers on Ray: the run restarts from its newest checkpoint, names the culprit, and ends the same."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
from torch import nn

import raytrain_hpc as rt
from raytrain_hpc.config import Config
from raytrain_hpc.errors import RunFailed
from tests.driver.lives import count, curve, joined, until
from tests.pool import WarmPool, small, steps_of

STEPS = 60
WORDS = [
    "model.dropout=0.1",
    f"train.steps={STEPS}",
    "train.micro_batch=1",
    "train.global_batch=24",
    "checkpoint.every=4",
    "cluster.workers=2",
]


def config(run_dir: Path, *words: str) -> Config:
    return small(run_dir, *WORDS, *words)


@pytest.fixture(scope="module")
def undisturbed(pool: WarmPool) -> list[tuple[float, float, float]]:
    """The same two ranks, with neither Ray nor a driver."""
    records = pool.train(small(None, *WORDS))[0]
    return [curve(metrics) for metrics in steps_of(records)]


def pids(run_dir: Path) -> list[int]:
    return [worker["pid"] for worker in json.loads((run_dir / "workers.json").read_text())["workers"]]


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_killed_worker(ray_cluster: None, undisturbed, tmp_path: Path) -> None:
    run = rt.start(config(tmp_path))
    until(lambda: count(tmp_path) >= 6)
    assert run.running and run.metrics()[0]["step"] == 1
    victim, killed = pids(tmp_path)[1], time.time()
    os.kill(victim, signal.SIGKILL)
    result = run.result(timeout=240)
    assert (result.outcome, result.steps, result.restarts) == ("done", STEPS, 1)
    assert json.loads((tmp_path / "result.json").read_text())["restarts"] == 1
    assert joined(tmp_path, STEPS) == undisturbed
    assert [curve(metrics) for metrics in run.metrics()] == undisturbed

    (incident,) = map(json.loads, (tmp_path / "incidents.jsonl").read_text().splitlines())
    assert (incident["kind"], incident["rank"], incident["pid"]) == ("died", 1, victim)
    workers = json.loads((tmp_path / "workers.json").read_text())
    assert incident["node"] == workers["workers"][1]["node"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first_again = next(line for line in lines if line["elastic/generation"] == 2)
    assert workers["generation"] == 2 and first_again["step"] % 4 == 1
    assert incident["steps_lost"] == len(lines) - STEPS == incident["step"] - first_again["step"] + 1
    assert incident["operation"] == f"training step {incident['step'] + 1}"
    assert 0 <= incident["detected_s"] < 20 and killed <= incident["time"] < killed + 20
    assert 0 < incident["recovered_s"] < time.time() - killed
    assert incident["recovered_s"] == pytest.approx(first_again["time/unix"] - incident["time"], abs=5)
    until(lambda: all(gone(pid) for pid in [victim, *pids(tmp_path)]))


def test_the_handle_stops_a_run(ray_cluster: None, undisturbed, tmp_path: Path) -> None:
    run = rt.start(config(tmp_path))
    until(lambda: len(run.metrics()) >= 3)
    with pytest.raises(TimeoutError, match=f"{tmp_path} goes on after 0.01 s"):
        run.result(timeout=0.01)
    run.stop()
    result = run.result(timeout=240)
    assert result.outcome == "stopped" and not run.running and 3 <= result.steps < STEPS
    assert result.checkpoint == f"{tmp_path}/checkpoints/step-{result.steps:08d}"
    assert [curve(metrics) for metrics in run.metrics()] == undisturbed[: result.steps]


def embedding_alone(config: Config) -> nn.Module:
    return nn.Embedding(64, 64)


def loss_that_breaks(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if torch.distributed.get_rank() == 1:
        raise ZeroDivisionError("a mistake of rank 1")
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def test_an_exception_names_its_own_rank_and_not_the_peers(ray_cluster: None, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    run = rt.start(config(tmp_path, "fault.max_failures=0"), model=embedding_alone, loss=loss_that_breaks)
    with pytest.raises(
        RunFailed, match=r"gave up after 1 failures \(fault.max_failures=0\): rank 1 .*a mistake of rank 1"
    ):
        run.result(timeout=240)
    (incident,) = map(json.loads, (tmp_path / "incidents.jsonl").read_text().splitlines())
    assert (incident["kind"], incident["rank"]) == ("raised", 1)
    assert incident["reason"] == "ZeroDivisionError: a mistake of rank 1"
    assert incident["pid"] == pids(tmp_path)[1]
    assert incident["recovered_s"] is None and incident["steps_lost"] is None
    assert not run.running
