"""Training over two nodes, and more workers asked for than there are slots."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driver.cli_process import curve
from tests.driver.two_node_cluster import TwoNodes
from tests.warm_pool import SMALL_OVERRIDES, WarmPool, get_step_metrics, make_small_config

pytestmark = pytest.mark.timeout(240)

WORDS = ["data.path=synthetic", "model.vocab_size=64", "model.hidden_size=32", "model.num_heads=4", "train.seq_len=16"]
WORDS += ["train.steps=3", "train.global_batch=12", "train.eval_samples=4", "observe.tensorboard=false"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    made = TwoNodes()
    yield made
    made.close()


def train(cluster: TwoNodes, run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *WORDS, *words]
    return subprocess.run(command, env=cluster.env, cwd=run_dir.parent, capture_output=True, text=True, timeout=150)


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_neighbouring_ranks_share_a_node(cluster: TwoNodes, tmp_path: Path) -> None:
    run_dir = tmp_path / "four"
    words = ["cluster.workers=4", "parallel.zero=3", "parallel.dp_shard=2", "train.micro_batch=1"]
    done = train(cluster, run_dir, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    workers = json.loads((run_dir / "workers.json").read_text())["workers"]
    nodes = [worker["node"] for worker in workers]
    assert [worker["rank"] for worker in workers] == [0, 1, 2, 3]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    # The shards of one replica lie on one node; replicas are across nodes.
    for worker in workers:
        assert worker["coordinates"]["dp_replicate"] == nodes.index(worker["node"]) // 2
    assert len({worker["pid"] for worker in workers}) == 4
    alone = train(cluster, tmp_path / "one", "cluster.workers=0", "train.micro_batch=1")
    assert alone.returncode == 0, alone.stderr
    assert losses(run_dir) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_more_workers_than_slots_is_refused_with_both_numbers(cluster: TwoNodes, tmp_path: Path) -> None:
    done = train(cluster, tmp_path / "five", "cluster.workers=5")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: cluster.workers=5: the cluster has 4 free CPU slots on 2 nodes")
    assert "use cluster.workers=4" in line
    assert "Traceback" not in done.stderr


FAR = 40  # steps that are compared, of which the thirteenth sees the end of a node
ELASTIC = [
    *SMALL_OVERRIDES,
    f"train.steps={FAR}",
    "train.deterministic=elastic",
    "train.micro_batch=3",
    "checkpoint.every=0",
    "cluster.start_timeout=60",
]


def start(cluster: TwoNodes, run_dir: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *ELASTIC, *words]
    return subprocess.Popen(
        command, env=cluster.env, cwd=run_dir.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def until(holds: Callable[[list[dict[str, Any]]], bool], run_dir: Path, process: subprocess.Popen[str]) -> None:
    """Wait for what is to be seen in the metrics, not for ever."""
    deadline = time.monotonic() + 120
    while not holds(lines(run_dir)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def workers(run_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run_dir / "workers.json").read_text())["workers"]
    return found


def test_a_node_is_lost_and_another_one_comes_and_is_drained(cluster: TwoNodes, pool: WarmPool, tmp_path: Path) -> None:
    """Of the shards that the lost one takes away the other has copies in memory, and goes on from the last step. The
    run grows onto the next node that is there, and leaves it at a step boundary when it is going to be taken away.

    Stages are in test_apart.py, tensor-parallel groups among the rows of docs/faults.md.
    """
    words, run_dir = ["parallel.zero=3", "cluster.workers=4", "train.schedule=constant"], tmp_path / "run"
    undisturbed = get_step_metrics(pool.train(make_small_config(None, *ELASTIC, *words))[0])
    process = start(cluster, run_dir, *words, "train.steps=100000")
    try:
        until(lambda found: len(found) >= 12, run_dir, process)
        there, lost = workers(run_dir), cluster.tell("lose")
        gone = [worker["rank"] for worker in there if worker["node"] == lost]
        until(lambda found: found[-1]["step"] >= FAR and found[-1]["elastic/world_size"] == 2, run_dir, process)
        came = cluster.tell("add")
        # Its two workers may join at one step or at two.
        until(lambda found: found[-1]["elastic/world_size"] == 4, run_dir, process)
        assert sorted(worker["node"] == came for worker in workers(run_dir)) == [False, False, True, True]
        assert cluster.tell("drain") == came
        until(lambda found: found[-1]["elastic/world_size"] == 2, run_dir, process)
        assert all(worker["node"] != came for worker in workers(run_dir)) and len(workers(run_dir)) == 2
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 3, output
    finally:
        process.kill()
        process.communicate()
    (incident,) = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    assert incident["node"] == lost and incident["kind"] in ("died", "node lost")
    assert len(gone) == 2 and incident["ranks"] == gone and incident["rank"] == gone[0], output
    assert (incident["world"], incident["world_after"]) == (4, 2)
    assert incident["steps_lost"] <= 1, "one whose copy was under way"
    last = {line["step"]: curve(line) for line in lines(run_dir)}
    assert sorted(last) == list(range(1, len(last) + 1))
    assert [last[step] for step in range(1, FAR + 1)] == [curve(metrics) for metrics in undisturbed]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of the metrics so far."""
    metrics = run_dir / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
