"""Faults of workers on Ray: the others go on in memory, the culprit is named, and the curve is that of no fault."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import raytrain_hpc as rt
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import ConfigError, RunFailedError
from tests.driver.cli_process import count, curve, joined, until
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS = 60
WORDS = [
    "model.dropout=0.1",
    f"train.steps={STEPS}",
    "train.micro_batch=1",
    "train.global_batch=24",
    "checkpoint.every=4",
    "cluster.workers=2",
    "train.deterministic=elastic",  # the same bits on one rank as on two
]


def config(run_dir: Path, *words: str) -> Config:
    return make_small_config(run_dir, *WORDS, *words)


@pytest.fixture(scope="module")
def undisturbed(pool: WarmPool) -> list[tuple[float, float, float]]:
    """The same two ranks, with neither Ray nor a driver."""
    records = pool.train(make_small_config(None, *WORDS))[0]
    return [curve(metrics) for metrics in get_step_metrics(records)]


def pids(run_dir: Path) -> list[int]:
    return [worker["pid"] for worker in json.loads((run_dir / "workers.json").read_text())["workers"]]


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


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

    (incident,) = incidents(tmp_path)
    assert (incident["kind"], incident["rank"], incident["pid"]) == ("died", 1, victim)
    workers = json.loads((tmp_path / "workers.json").read_text())
    assert incident["node"] == workers["workers"][0]["node"]
    assert (incident["world"], incident["world_after"], incident["steps_lost"]) == (2, 1, 0)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, STEPS + 1)), "no step was run again"
    first_after = next(line for line in lines(tmp_path) if line["elastic/generation"] == 2)
    assert first_after["elastic/world_size"] == 1 and first_after["step"] == incident["step"] + 1
    assert 0 <= incident["detected_s"] < 20 and killed <= incident["time"] < killed + 20
    assert 0 < incident["recovered_s"] < time.time() - killed
    assert incident["recovered_s"] == pytest.approx(first_after["time/unix"] - incident["time"], abs=5)
    until(lambda: all(gone(pid) for pid in [victim, *pids(tmp_path)]))


def test_one_fault_after_another(ray_cluster: None, undisturbed, tmp_path: Path) -> None:
    """A crash, an exception, a frozen process, a skipped collective, a flipped bit: each named, and nothing lost."""
    faults = [("kill", 2, 6), ("exception", 1, 20), ("stop", 1, 34), ("skip_collective", 1, 46), ("bitflip", 1, 56)]
    inject = ", ".join(f"{{kind: {kind}, rank: {rank}, step: {step}}}" for kind, rank, step in faults)
    words = [f"fault.inject=[{inject}]", "cluster.workers=3", "cluster.min_workers=3", "cluster.spares=1"]
    words += ["fault.compare_every=1", "fault.keep_agreed=true"]
    result = rt.train(config(tmp_path, *words), quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", STEPS, 5)
    assert joined(tmp_path, STEPS) == undisturbed
    found = incidents(tmp_path)
    assert [(one["kind"], one["rank"], one["step"] + 1) for one in found] == [
        ("died", 2, 6),
        ("raised", 1, 20),
        ("frozen", 1, 34),
        ("out of step", 1, 46),
        ("corrupt", 1, 56),
    ]
    assert [one["steps_lost"] for one in found] == [0, 0, 0, 0, 0]
    assert found[1]["reason"] == "ArithmeticError: injected"
    assert "all_reduce" in found[3]["operation"] and "0" in found[2]["stacks"]


def test_a_slow_rank_is_given_less_to_do(ray_cluster: None, pool: WarmPool, tmp_path: Path) -> None:
    constant = [*WORDS, "train.schedule=constant"]
    reference = [curve(metrics) for metrics in get_step_metrics(pool.train(make_small_config(None, *constant))[0])]
    words = ["train.schedule=constant", "train.steps=5000", "checkpoint.every=0", "fault.on_straggler=rebalance"]
    slow = "fault.inject=[{kind: slow, rank: 1, step: 3}]"
    run = rt.start(config(tmp_path, *words, slow, "cluster.workers=3", "data.engine=local"))
    until(lambda: count(tmp_path) > 60 and lines(tmp_path)[-1]["elastic/generation"] == 2)
    after = count(tmp_path)
    until(lambda: count(tmp_path) > after + 5)
    run.stop()
    assert run.result(timeout=240).outcome == "stopped"
    (incident,) = incidents(tmp_path)
    assert (incident["kind"], incident["rank"]) == ("slow", 1) and "times as long as the others" in incident["reason"]
    metrics = lines(tmp_path)
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert [curve(line) for line in metrics[:STEPS]] == reference


def test_more_come_back(ray_cluster: None, undisturbed, tmp_path: Path) -> None:
    """The place of one who is gone is taken as soon as another is up; until then the rest goes on."""
    words = ["fault.inject=[{kind: kill, rank: 0, step: 6}]", "train.steps=2000", "checkpoint.every=0"]
    run = rt.start(config(tmp_path, *words))
    until(lambda: count(tmp_path) > 6 and lines(tmp_path)[-1]["elastic/generation"] == 3)
    run.stop()
    assert run.result(timeout=240).outcome == "stopped"
    metrics = lines(tmp_path)
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    worlds = [line["elastic/world_size"] for line in metrics]
    assert worlds[0] == worlds[-1] == 2 and 1 in worlds
    (incident,) = incidents(tmp_path)
    assert (incident["kind"], incident["rank"]) == ("died", 0)


def test_the_number_of_workers_changes_as_asked(ray_cluster: None, pool: WarmPool, tmp_path: Path) -> None:
    constant = [*WORDS, "train.schedule=constant"]
    reference = [curve(metrics) for metrics in get_step_metrics(pool.train(make_small_config(None, *constant))[0])]
    run = rt.start(config(tmp_path, "train.schedule=constant", "train.steps=4000", "checkpoint.every=0"))
    until(lambda: count(tmp_path) > 5)
    for workers in (1, 2, 3):  # the third one is started for it
        run.resize(workers)
        until(lambda workers=workers: lines(tmp_path)[-1]["elastic/world_size"] == workers)
    with pytest.raises(ConfigError, match="workers=0 .*cluster.min_workers allows no fewer than 1"):
        run.resize(0)
    run.stop()
    assert run.result(timeout=240).outcome == "stopped"
    metrics = lines(tmp_path)
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1)), "none lost, none again"
    assert {line["elastic/world_size"] for line in metrics[:STEPS]} >= {1, 2}
    assert [curve(line) for line in metrics[:STEPS]] == reference[: len(metrics)]
    assert not (tmp_path / "incidents.jsonl").exists()


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
        RunFailedError, match=r"gave up after 1 failures \(fault.max_failures=0\): rank 1 .*a mistake of rank 1"
    ):
        run.result(timeout=240)
    (incident,) = map(json.loads, (tmp_path / "incidents.jsonl").read_text().splitlines())
    assert (incident["kind"], incident["rank"]) == ("raised", 1)
    assert incident["reason"] == "ZeroDivisionError: a mistake of rank 1"
    assert incident["pid"] == pids(tmp_path)[1]
    assert incident["recovered_s"] is None and incident["steps_lost"] is None
    assert not run.running
