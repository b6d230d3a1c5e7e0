"""Training over two nodes: placement, loss of a node, growth onto a new node, and draining."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_hpc.config.loader import load_config
from tests.driver.cli_process import curve_point, read_curve
from tests.driver.throttle import throttle
from tests.driver.two_node_cluster import TwoNodeCluster
from tests.json_lines import read_json_lines
from tests.warm_pool import SMALL_OVERRIDES, WarmPool, get_step_metrics, make_small_config

pytestmark = pytest.mark.timeout(240)

WORDS = ["data.path=synthetic", "model.vocab_size=64", "model.hidden_size=32", "model.num_heads=4", "train.seq_len=16"]
WORDS += ["train.steps=3", "train.global_batch_size=12", "eval.samples=4", "logging.tensorboard=false"]
ONE_RANK = ["cluster.workers=1", "train.micro_batch_size=1"]


@pytest.fixture(scope="module")
def cluster(ray_python: Path) -> Iterator[TwoNodeCluster]:
    nodes = TwoNodeCluster(python=ray_python)
    yield nodes
    nodes.close()


def train(cluster: TwoNodeCluster, run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *WORDS, *words]
    return subprocess.run(command, env=cluster.env, cwd=run_dir.parent, capture_output=True, text=True, timeout=150)


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_neighboring_ranks_share_a_node(cluster: TwoNodeCluster, pool: WarmPool, tmp_path: Path) -> None:
    run_dir = tmp_path / "four"
    words = ["cluster.workers=4", "parallel.zero=3", "parallel.dp_shard=2", "train.micro_batch_size=1"]
    process = train(cluster, run_dir, *words)
    assert process.returncode == 0, process.stdout + process.stderr
    workers = json.loads((run_dir / "workers.json").read_text())["workers"]
    nodes = [worker["node_id"] for worker in workers]
    assert [worker["rank"] for worker in workers] == [0, 1, 2, 3]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    # The shards of a replica are on one node, and the two replicas on different nodes.
    for worker in workers:
        assert worker["coordinates"]["dp_replicate"] == nodes.index(worker["node_id"]) // 2
    assert len({worker["pid"] for worker in workers}) == 4
    single = get_step_metrics(pool.train(load_config(None, [*WORDS, f"run.dir={tmp_path / 'one'}", *ONE_RANK]))[0])
    assert losses(run_dir) == pytest.approx([metrics["train/loss"] for metrics in single], rel=1e-6)


def test_too_many_workers_are_refused_with_both_numbers(cluster: TwoNodeCluster, tmp_path: Path) -> None:
    process = train(cluster, tmp_path / "five", "cluster.workers=5", "cluster.start_timeout=0.1")
    assert process.returncode == 2
    line, *others = process.stderr.splitlines()
    assert not others, process.stderr
    assert line.startswith("error: cluster.workers=5: the cluster has 4 free CPU slots on 2 nodes")
    assert "use cluster.workers=4" in line
    assert "Traceback" not in process.stderr


COMPARED_STEPS = 40  # steps that are compared; a node is lost after the twelfth
ELASTIC = [
    *SMALL_OVERRIDES,
    f"train.steps={COMPARED_STEPS}",
    "train.deterministic=elastic",
    "train.micro_batch_size=3",
    "checkpoint.interval=0",
    "cluster.start_timeout=60",
]


def start(cluster: TwoNodeCluster, run_dir: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *ELASTIC, *words]
    return subprocess.Popen(
        command, env=cluster.env, cwd=run_dir.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_success(process: subprocess.Popen[str]) -> str:
    """Return the output of a run when it has ended with code 0; fail otherwise, or after two minutes."""
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    return output


def wait_until(
    condition: Callable[[list[dict[str, Any]]], bool], run_dir: Path, process: subprocess.Popen[str]
) -> None:
    """Wait until the condition holds for the metrics so far; fail after two minutes."""
    deadline = time.monotonic() + 120
    while not condition(read_lines(run_dir)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def read_workers(run_dir: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((run_dir / "workers.json").read_text())["workers"]
    return entries


needs_own_node = pytest.mark.skipif(
    ray.__version__.startswith("2.50."), reason="a driver of Ray 2.50 may connect to either of two nodes of one host"
)


@needs_own_node
def test_all_workers_are_killed_on_both_nodes(cluster: TwoNodeCluster, pool: WarmPool, tmp_path: Path) -> None:
    """The agents of the nodes hold what the workers of both had, snapshots and replicas: no rank has it any more."""
    words, run_dir = ["parallel.zero=3", "cluster.workers=4", "train.steps=30"], tmp_path / "run"
    reference = get_step_metrics(pool.train(make_small_config(None, *ELASTIC, *words))[0])
    process = start(cluster, run_dir, *words, *throttle(10))
    try:
        wait_until(lambda metrics: len(metrics) >= 8, run_dir, process)
        workers = read_workers(run_dir)
        for worker in workers:
            os.kill(worker["pid"], signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.communicate()
    assert len({worker["node_id"] for worker in workers}) == 2
    incidents = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    assert incidents and all(incident["steps_lost"] in (0, 1) for incident in incidents), output
    curve_of_step = {line["step"]: curve_point(line) for line in read_lines(run_dir)}  # a lost step is there twice
    assert [curve_of_step[metrics["step"]] for metrics in reference] == [curve_point(metrics) for metrics in reference]


@needs_own_node
def test_a_node_whose_network_is_down_is_left(cluster: TwoNodeCluster, pool: WarmPool, tmp_path: Path) -> None:
    """A rank of one node, which may be the driver's, receives nothing from others, while Ray reaches its process."""
    words, run_dir = ["parallel.zero=3", "cluster.workers=4", "train.steps=150"], tmp_path / "run"
    reference = get_step_metrics(pool.train(make_small_config(None, *ELASTIC, *words))[0])
    process = start(cluster, run_dir, *words, *throttle(4, "{kind: network_down, rank: 3, step: 10}"))
    output = wait_for_success(process)
    (incident,) = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    assert (incident["kind"], incident["ranks"], incident["world_after"]) == ("link down", [2, 3], 2), output
    assert incident["step"] == 9 and incident["steps_lost"] == 0 and incident["recovered_s"] < 5
    assert "ranks 2, 3 cut off from the network at step 10; recovered in" in output
    assert {line["elastic/world_size"] for line in read_lines(run_dir)[9:]} == {2}, "the node is not used again"
    assert read_curve(run_dir, 150) == [curve_point(metrics) for metrics in reference]


@needs_own_node
def test_the_node_of_a_rank_that_computes_wrong_is_left(
    cluster: TwoNodeCluster, pool: WarmPool, tmp_path: Path
) -> None:
    """Its workers leave too, and the run does not return to it, although Ray says that it is alive."""
    words, run_dir = ["cluster.workers=4", "train.steps=60"], tmp_path / "run"
    reference = get_step_metrics(pool.train(make_small_config(None, *ELASTIC, *words))[0])
    fault = "fault.inject=[{kind: bitflip_activation, rank: 3, step: 14, bit: 12, persistent: true}]"
    audits = ["fault.audit_interval=5", "fault.keep_verified_state=true", "fault.stall_timeout=20"]
    process = start(cluster, run_dir, *words, fault, *audits)
    output = wait_for_success(process)
    (incident,) = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    assert (incident["kind"], incident["rank"], incident["step"] + 1) == ("faulty device", 3, 15), output
    assert (incident["world_after"], incident["steps_lost"]) == (2, 4), output
    nodes = {worker["node_id"] for worker in read_workers(run_dir)}
    assert len(nodes) == 1 and incident["node_id"] not in nodes
    worlds = {line["elastic/world_size"] for line in read_lines(run_dir) if line["elastic/generation"] > 1}
    assert worlds == {2}, "the node is not used again"
    assert read_curve(run_dir, 60) == [curve_point(metrics) for metrics in reference]


@needs_own_node
def test_node_is_lost_another_is_added_and_drained(cluster: TwoNodeCluster, pool: WarmPool, tmp_path: Path) -> None:
    """Lose a node whose shards the other node holds as replicas, grow onto an added node, and leave it when it drains.

    Pipeline stages are tested in test_network_partition.py, tensor-parallel groups in docs/faults.md.
    """
    words, run_dir = ["parallel.zero=3", "cluster.workers=4", "lr_scheduler.name=constant"], tmp_path / "run"
    reference = get_step_metrics(pool.train(make_small_config(None, *ELASTIC, *words))[0])
    process = start(cluster, run_dir, *words, *throttle(4), "train.steps=100000")
    try:
        wait_until(lambda metrics: len(metrics) >= 12, run_dir, process)
        workers_before, lost_node = read_workers(run_dir), cluster.send("lose")
        nodes_before = [worker["node_id"] for worker in workers_before]
        assert nodes_before[0] == nodes_before[1] != nodes_before[2] == nodes_before[3], "neighbors share a node"
        lost_ranks = [worker["rank"] for worker in workers_before if worker["node_id"] == lost_node]
        wait_until(lambda metrics: metrics[-1]["elastic/world_size"] == 2, run_dir, process)
        added = cluster.send("add")
        # Its two workers may join at the same step or at two steps.
        wait_until(lambda metrics: metrics[-1]["elastic/world_size"] == 4, run_dir, process)
        assert sorted(worker["node_id"] == added for worker in read_workers(run_dir)) == [False, False, True, True]
        assert cluster.send("drain") == added
        wait_until(
            lambda metrics: metrics[-1]["step"] >= COMPARED_STEPS and metrics[-1]["elastic/world_size"] == 2,
            run_dir,
            process,
        )
        assert all(worker["node_id"] != added for worker in read_workers(run_dir)) and len(read_workers(run_dir)) == 2
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 3, output
    finally:
        process.kill()
        process.communicate()
    (incident,) = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    assert incident["node_id"] == lost_node and incident["kind"] in ("died", "node lost")
    assert {worker["node"] for worker in workers_before} == {f"{socket.gethostname()}#{n}" for n in (1, 2)}
    assert incident["node"] in output and "recovered in" in output
    assert not re.search(r"[0-9a-f]{40}", output), f"identifiers, or Ray's own messages: {output}"
    assert len(lost_ranks) == 2 and incident["ranks"] == lost_ranks and incident["rank"] == lost_ranks[0], output
    assert (incident["world"], incident["world_after"]) == (4, 2)
    assert incident["steps_lost"] <= 1, "at most the step whose replication was in progress"
    curve_of_step = {line["step"]: curve_point(line) for line in read_lines(run_dir)}
    assert sorted(curve_of_step) == list(range(1, len(curve_of_step) + 1))
    assert [curve_of_step[step] for step in range(1, COMPARED_STEPS + 1)] == [
        curve_point(metrics) for metrics in reference
    ]


def read_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics so far."""
    return read_json_lines(run_dir / "metrics.jsonl")
