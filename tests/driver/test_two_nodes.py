"""Training over two nodes, and more workers asked for than there are slots."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(240)

WORDS = ["data.path=synthetic", "model.vocab_size=64", "model.hidden_size=32", "model.num_heads=4", "train.seq_len=16"]
WORDS += ["train.steps=3", "train.global_batch=12", "train.eval_samples=4", "observe.tensorboard=false"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of a driver on a cluster of its own, in processes of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("two_nodes.py")],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    address = process.stdout.readline().strip()
    family = psutil.Process(process.pid).children(recursive=True)
    try:
        yield env | {"RAY_ADDRESS": address}
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()
        for one in psutil.wait_procs(family, timeout=10)[1]:
            one.kill()


def train(cluster: dict[str, str], run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *WORDS, *words]
    return subprocess.run(command, env=cluster, cwd=run_dir.parent, capture_output=True, text=True, timeout=150)


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_neighbouring_ranks_share_a_node(cluster: dict[str, str], tmp_path: Path) -> None:
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


def test_more_workers_than_slots_is_refused_with_both_numbers(cluster: dict[str, str], tmp_path: Path) -> None:
    done = train(cluster, tmp_path / "five", "cluster.workers=5")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: cluster.workers=5: the cluster has 4 free CPU slots on 2 nodes")
    assert "use cluster.workers=4" in line
    assert "Traceback" not in done.stderr
