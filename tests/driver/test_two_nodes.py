"""Training over two nodes, and more workers asked for than there are slots."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.driver.lives import curve, joined
from tests.driver.two_nodes import TwoNodes
from tests.pool import SMALL, WarmPool, small, steps_of

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


FAR = 40  # steps, of which the thirteenth sees the end of a node
ELASTIC = [
    *SMALL,
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


def until_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or (run_dir / "metrics.jsonl").read_bytes().count(b"\n") < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)


def test_a_lost_node(cluster: TwoNodes, pool: WarmPool, tmp_path: Path) -> None:
    """The shards that it takes away the other one has as copies in memory, and goes on from the last step.

    Stages are in test_apart.py, tensor-parallel groups among the rows of docs/faults.md.
    """
    words, run_dir = ["parallel.zero=3"], tmp_path / "run"
    undisturbed = steps_of(pool.train(small(None, *ELASTIC, *words, "cluster.workers=4"))[0])
    process = start(cluster, run_dir, *words, "cluster.workers=4")
    try:
        until_step(run_dir, 12, process)
        there = json.loads((run_dir / "workers.json").read_text())["workers"]
        lost = cluster.tell("lose")
        gone = [worker["rank"] for worker in there if worker["node"] == lost]
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        (incident,) = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
        assert incident["node"] == lost and incident["kind"] in ("died", "node lost")
        assert len(gone) == 2 and incident["ranks"] == gone and incident["rank"] == gone[0], output
        assert (incident["world"], incident["world_after"]) == (4, 2)
        assert incident["steps_lost"] <= 1, "one whose copy was under way"
        assert joined(run_dir, FAR) == [curve(metrics) for metrics in undisturbed]
    finally:
        process.kill()
        process.communicate()
        cluster.tell("add")


def test_a_node_that_is_drained_and_one_that_comes(cluster: TwoNodes, tmp_path: Path) -> None:
    """The run leaves it at a step boundary; on the next node that is there it grows again."""
    run_dir = tmp_path / "run"
    process = start(cluster, run_dir, "parallel.zero=3", "cluster.workers=4", "train.steps=100000")
    worlds: list[int] = []
    try:
        until_step(run_dir, 12, process)
        drained = cluster.tell("drain")
        deadline = time.monotonic() + 60
        while not worlds or worlds[-1] == 4:
            worlds = [line["elastic/world_size"] for line in lines(run_dir)]
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        there = json.loads((run_dir / "workers.json").read_text())["workers"]
        assert len(there) == 2 and all(worker["node"] != drained for worker in there)
        assert not (run_dir / "incidents.jsonl").exists()
        assert cluster.tell("lose") == drained
        came = cluster.tell("add")
        while worlds[-1] != 4:  # its two workers may join at one step or at two
            worlds = [line["elastic/world_size"] for line in lines(run_dir)]
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        there = json.loads((run_dir / "workers.json").read_text())["workers"]
        assert sorted(worker["node"] == came for worker in there) == [False, False, True, True]
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 3, output
        assert [line["step"] for line in lines(run_dir)] == list(range(1, len(lines(run_dir)) + 1)), "none lost"
    finally:
        process.kill()
        process.communicate()


def lines(run_dir: Path) -> list[dict[str, Any]]:
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
