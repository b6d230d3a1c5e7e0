"""Faults of workers on Ray: the others continue from memory, the failed rank is named, the curve is unchanged."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch import nn

import raytrain_hpc as rt
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import Config
from raytrain_hpc.distributed import process_groups
from raytrain_hpc.elastic.audit_schedule import choose_interval
from raytrain_hpc.errors import ConfigError, RunFailedError
from tests.driver.cli_process import count_steps, curve_point, read_curve, wait_until
from tests.driver.throttle import throttle
from tests.json_lines import read_json_lines
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS = 60
WORDS = [
    "model.dropout=0.1",
    f"train.steps={STEPS}",
    "train.micro_batch_size=1",
    "train.global_batch_size=12",
    "checkpoint.interval=4",
    "cluster.workers=2",
    "train.deterministic=elastic",  # the same bits on one rank as on two
]


def make_config(run_dir: Path, *words: str) -> Config:
    return make_small_config(run_dir, *WORDS, *words)


def train_reference(pool: WarmPool, steps: int, *words: str) -> list[tuple[float, float, float]]:
    """Return the curve of `steps` steps on two ranks, without Ray or a driver."""
    records = pool.train(make_small_config(None, *WORDS, *words), steps_to=steps)[0]
    return [curve_point(metrics) for metrics in get_step_metrics(records)]


@pytest.fixture(scope="module")
def reference_curve(pool: WarmPool) -> list[tuple[float, float, float]]:
    return train_reference(pool, STEPS)


def read_pids(run_dir: Path) -> list[int]:
    return [worker["pid"] for worker in json.loads((run_dir / "workers.json").read_text())["workers"]]


def has_exited(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


PHASES = ("detect", "abort", "fence", "rendezvous", "communicator", "state", "data", "first step")


def read_incidents(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    return read_json_lines(run_dir / "metrics.jsonl")


def test_killed_worker(ray_cluster: None, reference_curve, tmp_path: Path) -> None:
    run = rt.start(make_config(tmp_path))
    wait_until(lambda: count_steps(tmp_path) >= 6)
    assert run.running and run.metrics()[0]["step"] == 1
    victim, killed = read_pids(tmp_path)[1], time.time()
    os.kill(victim, signal.SIGKILL)
    result = run.result(timeout=240)
    assert (result.outcome, result.steps, result.restarts) == ("done", STEPS, 1)
    assert json.loads((tmp_path / "result.json").read_text())["restarts"] == 1
    assert read_curve(tmp_path, STEPS) == reference_curve
    assert [curve_point(metrics) for metrics in run.metrics()] == reference_curve

    (incident,) = read_incidents(tmp_path)
    assert (incident["kind"], incident["rank"], incident["pid"]) == ("died", 1, victim)
    workers = json.loads((tmp_path / "workers.json").read_text())
    assert incident["node"] == workers["workers"][0]["node"]
    assert (incident["world"], incident["world_after"], incident["steps_lost"]) == (2, 1, 0)
    assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, STEPS + 1)), "no step is repeated"
    first_after = next(line for line in read_lines(tmp_path) if line["elastic/generation"] == 2)
    assert first_after["elastic/world_size"] == 1 and first_after["step"] == incident["step"] + 1
    assert 0 <= incident["detected_s"] < 20 and killed <= incident["time"] < killed + 20
    assert 0 < incident["recovered_s"] < time.time() - killed
    assert incident["recovered_s"] == pytest.approx(first_after["time/unix"] - incident["time"], abs=5)
    phases = incident["phases"]
    assert list(phases) == [*PHASES] and min(phases.values()) >= 0 < phases["state"]
    assert sum(phases.values()) == pytest.approx(incident["detected_s"] + incident["recovered_s"])
    wait_until(lambda: all(has_exited(pid) for pid in [victim, *read_pids(tmp_path)]))


def test_consecutive_faults(ray_cluster: None, reference_curve, tmp_path: Path) -> None:
    """Each is attributed to its rank and told apart. Other tests inject a kill and an exception."""
    faults = [("segfault", 2, 6), ("oom", 1, 16), ("resize_collective", 2, 26)]
    faults += [("stop", 1, 36), ("skip_collective", 1, 46), ("network_down", 2, 51), ("bitflip", 1, 56)]
    inject = ", ".join(f"{{kind: {kind}, rank: {rank}, step: {step}}}" for kind, rank, step in faults)
    words = [f"fault.inject=[{inject}]", "cluster.workers=3", "cluster.min_workers=3", "cluster.spares=1"]
    words += ["fault.replica_check_interval=1", "fault.keep_verified_state=true"]
    result = rt.train(make_config(tmp_path, *words), quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", STEPS, 7)
    assert read_curve(tmp_path, STEPS) == reference_curve
    incidents = read_incidents(tmp_path)
    assert incidents[2]["kind"] in ("out of step", "crashed"), "gloo ends a process that receives more than expected"
    incidents[2]["kind"] = "out of step"
    assert [(incident["kind"], incident["rank"], incident["step"] + 1) for incident in incidents] == [
        ("crashed", 2, 6),
        ("out of memory", 1, 16),
        ("out of step", 2, 26),
        ("frozen", 1, 36),
        ("out of step", 1, 46),
        ("link down", 2, 51),
        ("corrupt", 1, 56),
    ]
    assert [incident["steps_lost"] for incident in incidents] == [0] * 7
    assert incidents[0]["reason"] == "segmentation fault in its process" and "_crash" in incidents[0]["stacks"]["2"]
    assert "tried to allocate" in incidents[1]["reason"]
    assert "all_reduce" in incidents[4]["operation"] and "0" in incidents[3]["stacks"]
    assert incidents[5]["reason"].startswith("nothing is acknowledged from rank ") and "2" in incidents[5]["reason"]
    assert "all_reduce" in incidents[5]["operation"]


class FaultWhileGroupsAreCreated(rt.Callback):
    """Rank 1 sends itself a signal after the rendezvous of the second generation, before its process groups exist."""

    def __init__(self, run_dir: Path, number: signal.Signals):
        self._run_dir, self._number = run_dir, number

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Patch the process that receives the callback. In a worker, no other one has been created by then."""
        self.__dict__ |= state
        marker, real = self._run_dir / "signalled", dist.init_process_group

        def init_process_group(*arguments: Any, rank: int, **options: Any) -> None:
            if rank == 1 and (self._run_dir / "incidents.jsonl").exists() and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), self._number)
            real(*arguments, rank=rank, **options)

        process_groups.dist = SimpleNamespace(**vars(dist) | {"init_process_group": init_process_group})


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "frozen")])
def test_a_rank_that_is_lost_while_groups_are_created_costs_no_step(
    ray_cluster: None, reference_curve, tmp_path: Path, number: signal.Signals, kind: str
) -> None:
    words = ["cluster.workers=4", "fault.inject=[{kind: kill, rank: 3, step: 6}]", "checkpoint.interval=0"]
    config = make_config(tmp_path, *words, "train.steps=20")
    result = rt.train(config, callbacks=[FaultWhileGroupsAreCreated(tmp_path, number)], quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", 20, 2)
    first, second = read_incidents(tmp_path)
    assert (first["kind"], first["rank"], first["steps_lost"]) == ("died", 3, 0)
    assert (second["kind"], second["rank"], second["steps_lost"]) == (kind, 1, 0)
    assert second["detected_s"] < 8 and [line["step"] for line in read_lines(tmp_path)] == list(range(1, 21))


def test_audits_undo_a_transient_fault_and_replace_a_broken_rank(ray_cluster: None, tmp_path: Path) -> None:
    """Both ranks are named with their place, and the losses are those of a run without faults."""
    words = ["train.deterministic=elastic", "cluster.workers=3", "cluster.min_workers=3", "train.steps=30"]
    result = rt.train(make_config(tmp_path / "clean", *words), quiet=True)
    faults = "{kind: bitflip_gradient, rank: 2, step: 8, bit: 22}, "
    faults += "{kind: bitflip_activation, rank: 1, step: 19, bit: 22, persistent: true}"
    words += [f"fault.inject=[{faults}]", "fault.audit_interval=4", "fault.keep_verified_state=true"]
    result = rt.train(make_config(tmp_path / "faults", *words), quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", 30, 1)
    assert read_curve(tmp_path / "faults", 30) == read_curve(tmp_path / "clean", 30)
    transient, persistent = read_incidents(tmp_path / "faults")
    assert (transient["kind"], transient["rank"], transient["step"]) == ("silent corruption", 2, 7)
    assert (persistent["kind"], persistent["rank"], persistent["step"]) == ("faulty device", 1, 19)
    assert persistent["steps_lost"] == 3, "back to the state after step 16, which was audited"
    for incident in (transient, persistent):
        assert incident["node"] and incident["pid"] and "gradient of" in incident["reason"]


def test_audits_find_a_wrong_shard_that_no_other_rank_has(ray_cluster: None, tmp_path: Path) -> None:
    """Verified state outlives the rank that has it: a peer keeps a copy, and no checkpoint is needed."""
    words = ["train.deterministic=elastic", "parallel.zero=3", "cluster.workers=3", "cluster.min_workers=3"]
    words += ["train.steps=30", "checkpoint.interval=0"]
    rt.train(make_config(tmp_path / "clean", *words), quiet=True)
    faults = "{kind: bitflip_moment, rank: 1, step: 8, bit: 3}, "
    faults += "{kind: bitflip_update, rank: 2, step: 19, bit: 0, persistent: true}"
    words += [f"fault.inject=[{faults}]", "fault.audit_interval=4", "fault.keep_verified_state=true"]
    result = rt.train(make_config(tmp_path / "faults", *words), quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", 30, 2)
    assert read_curve(tmp_path / "faults", 30) == read_curve(tmp_path / "clean", 30)
    memory, update = read_incidents(tmp_path / "faults")
    assert (memory["kind"], memory["rank"], memory["step"] - memory["steps_lost"]) == ("corrupt", 1, 4)
    assert "optimizer." in memory["reason"] and "has changed since step 7" in memory["reason"]
    assert (update["kind"], update["rank"], update["step"] - update["steps_lost"]) == ("faulty device", 2, 16)
    assert "rank 2 computed the update wrong" in update["reason"]


def test_of_two_ranks_that_disagree_the_broken_one_is_found(ray_cluster: None, tmp_path: Path) -> None:
    """The other one is replaced first. The device of the rank stays broken, whatever the generation.

    No state is kept in memory: the run goes back to the checkpoint before the last audit, not to the newest one.
    """
    words = ["train.deterministic=elastic", "cluster.workers=2", "cluster.min_workers=2", "train.steps=20"]
    rt.train(make_config(tmp_path / "clean", *words), quiet=True)
    fault = "fault.inject=[{kind: bitflip_activation, rank: 0, step: 6, bit: 22, persistent: true}]"
    words += [fault, "fault.audit_interval=4", "checkpoint.interval=3", "checkpoint.async=false"]
    result = rt.train(make_config(tmp_path / "faults", *words))
    assert (result.outcome, result.steps, result.restarts) == ("done", 20, 2)
    untrusted = json.loads((tmp_path / "faults" / "checkpoints" / "untrusted.json").read_text())
    assert [(entry["after_step"], entry["generation"]) for entry in untrusted] == [(4, 1), (3, 2)]
    # Whether the checkpoint of step 6 was complete when the fault was found is a matter of time.
    store = CheckpointStore(tmp_path / "faults" / "checkpoints")
    reason = "saved after step 4, the last one known to be right: rank 1, suspected"
    assert (store.find_distrust(6, 1) or "").startswith(reason) and store.find_distrust(3, 1) is None
    assert read_curve(tmp_path / "faults", 20) == read_curve(tmp_path / "clean", 20)
    manifests = [tmp_path / "faults" / "checkpoints" / f"step-{step:08}" / "manifest.json" for step in (18, 20)]
    assert [json.loads(path.read_text())["meta"]["verified_step"] for path in manifests] == [16, 20]
    incidents = read_incidents(tmp_path / "faults")
    assert [incident["kind"] for incident in incidents] == ["suspected", "faulty device"]
    pids = [incident["pid"] for incident in incidents]
    assert json.loads((tmp_path / "faults" / "injected" / "0").read_text())["pid"] == pids[1] != pids[0]


# At a constant learning rate, the curve does not depend on the last step.
UNTIL_STOPPED = ["lr_scheduler.name=constant", "train.steps=5000", "checkpoint.interval=0"]


def test_slow_rank_gets_fewer_microbatches(ray_cluster: None, pool: WarmPool, tmp_path: Path) -> None:
    words = [*UNTIL_STOPPED, "train.global_batch_size=24", "fault.on_straggler=rebalance", "cluster.workers=3"]
    run = rt.start(make_config(tmp_path, *words, "fault.inject=[{kind: slow, rank: 1, step: 3}]"))
    wait_until(lambda: count_steps(tmp_path) > 5 and read_lines(tmp_path)[-1]["elastic/generation"] == 2)
    after = count_steps(tmp_path)
    wait_until(lambda: count_steps(tmp_path) > after + 5)
    run.stop()
    assert run.result(timeout=240).outcome == "stopped"
    (incident,) = read_incidents(tmp_path)
    assert (incident["kind"], incident["rank"]) == ("slow", 1) and "times as long as the others" in incident["reason"]
    metrics = read_lines(tmp_path)
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    assert [curve_point(line) for line in metrics] == train_reference(pool, len(metrics), *words, "cluster.workers=2")


def test_replacement_worker_joins(ray_cluster: None, reference_curve, tmp_path: Path) -> None:
    """Continue on one rank until the replacement of the lost one is ready."""
    words = ["train.steps=2000", "checkpoint.interval=0", *throttle(2, "{kind: kill, rank: 0, step: 6}")]
    run = rt.start(make_config(tmp_path, *words))
    wait_until(lambda: count_steps(tmp_path) > 6 and read_lines(tmp_path)[-1]["elastic/generation"] == 3)
    run.stop()
    assert run.result(timeout=240).outcome == "stopped"
    metrics = read_lines(tmp_path)
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    worlds = [line["elastic/world_size"] for line in metrics]
    assert worlds[0] == worlds[-1] == 2 and 1 in worlds
    (incident,) = read_incidents(tmp_path)
    assert (incident["kind"], incident["rank"]) == ("died", 0)


def test_resize_changes_the_number_of_workers(ray_cluster: None, pool: WarmPool, tmp_path: Path) -> None:
    run = rt.start(make_config(tmp_path, *UNTIL_STOPPED, *throttle(2)))
    wait_until(lambda: count_steps(tmp_path) > 5)
    for workers in (1, 2, 3):  # the third worker is started on request
        run.resize(workers)
        wait_until(lambda workers=workers: read_lines(tmp_path)[-1]["elastic/world_size"] == workers)
    with pytest.raises(ConfigError, match="workers=0 .*cluster.min_workers allows no fewer than 1"):
        run.resize(0)
    run.stop()
    assert run.result(timeout=240).outcome == "stopped"
    metrics = read_lines(tmp_path)
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1)), "no step is lost or repeated"
    assert {line["elastic/world_size"] for line in metrics} == {1, 2, 3}
    assert [curve_point(line) for line in metrics] == train_reference(pool, len(metrics), *UNTIL_STOPPED)
    assert not (tmp_path / "incidents.jsonl").exists()


def test_run_is_stopped_through_its_handle(ray_cluster: None, reference_curve, tmp_path: Path) -> None:
    run = rt.start(make_config(tmp_path))
    wait_until(lambda: len(run.metrics()) >= 3)
    with pytest.raises(TimeoutError, match=f"{tmp_path} is still running after 0.01 s"):
        run.result(timeout=0.01)
    run.stop()
    result = run.result(timeout=240)
    assert result.outcome == "stopped" and not run.running and 3 <= result.steps < STEPS
    assert result.checkpoint == f"{tmp_path}/checkpoints/step-{result.steps:08d}"
    assert [curve_point(metrics) for metrics in run.metrics()] == reference_curve[: result.steps]


def build_embedding(config: Config) -> nn.Module:
    return nn.Embedding(64, 64)


def raise_in_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if torch.distributed.get_rank() == 1:
        raise ZeroDivisionError("a mistake of rank 1")
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def test_exception_is_attributed_to_its_own_rank(ray_cluster: None, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    run = rt.start(make_config(tmp_path, "fault.max_failures=0"), model=build_embedding, loss=raise_in_loss)
    with pytest.raises(
        RunFailedError, match=r"gave up after 1 failures \(fault.max_failures=0\): rank 1 .*a mistake of rank 1"
    ):
        run.result(timeout=240)
    (incident,) = map(json.loads, (tmp_path / "incidents.jsonl").read_text().splitlines())
    assert (incident["kind"], incident["rank"]) == ("raised", 1)
    place = f"test_ray_faults.py:{raise_in_loss.__code__.co_firstlineno + 2}, in raise_in_loss"
    assert incident["reason"] == f"ZeroDivisionError: a mistake of rank 1 ({place})"
    assert incident["pid"] == read_pids(tmp_path)[1]
    assert incident["recovered_s"] is None and incident["steps_lost"] is None
    assert not run.running


def test_a_persistent_fault_is_found_within_the_automatic_interval(ray_cluster: None, tmp_path: Path) -> None:
    """The rank is replaced, and all steps since the last clean audit are trained again, with the same losses."""
    steps, interval = 480, choose_interval("auto", [range(1)])
    first, second = interval, 2 * interval
    words = ["cluster.workers=3", "cluster.min_workers=3", f"train.steps={steps}", "train.global_batch_size=3"]
    words += ["checkpoint.interval=0", "model.hidden_size=16", "eval.interval=0"]
    rt.train(make_config(tmp_path / "clean", *words), quiet=True)
    fault = f"fault.inject=[{{kind: bitflip_activation, rank: 1, step: {first + 25}, bit: 12, persistent: true}}]"
    words += [fault, "fault.audit_interval=auto", "fault.keep_verified_state=true"]
    result = rt.train(make_config(tmp_path / "fault", *words), quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", steps, 1)
    assert read_curve(tmp_path / "fault", steps) == read_curve(tmp_path / "clean", steps)
    (incident,) = read_incidents(tmp_path / "fault")
    assert (incident["kind"], incident["rank"], incident["step"] + 1) == ("faulty device", 1, second)
    assert incident["steps_lost"] == second - 1 - first, "back to the state after the first audit"
    assert [line["step"] for line in read_lines(tmp_path / "fault") if line.get("elastic/audited")] == [first, second]
