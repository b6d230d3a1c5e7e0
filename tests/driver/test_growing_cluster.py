"""A run that follows its cluster: it waits for nodes, uses those that join, and leaves those that are announced to go.

The losses of all steps are bit for bit those of one process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from raytrain_hpc.cli.main import main
from tests.driver.cli_process import curve_point, wait_until
from tests.driver.throttle import throttle
from tests.driver.two_node_cluster import TwoNodeCluster
from tests.warm_pool import SMALL_OVERRIDES, WarmPool, get_step_metrics, make_small_config

pytestmark = pytest.mark.timeout(240)

COMPARED_STEPS = 60
WORDS = [
    *SMALL_OVERRIDES,
    f"train.steps={COMPARED_STEPS}",
    "train.deterministic=elastic",
    "train.micro_batch_size=2",
    "checkpoint.interval=0",
    "lr_scheduler.name=constant",
]
FOLLOWING = ["cluster.workers=auto", "cluster.cpus_per_worker=1", "cluster.resize_interval=2", "data.engine=local"]


@pytest.fixture(scope="module")
def cluster(ray_python: Path) -> Iterator[TwoNodeCluster]:
    nodes = TwoNodeCluster(cpus=[1], python=ray_python)
    yield nodes
    nodes.close()


class FollowingRun:
    """A run in a process of its own, whose output goes to a file."""

    def __init__(self, cluster: TwoNodeCluster, directory: Path, *words: str):
        self.directory, self.out = directory, directory.with_suffix(".out")
        notice = f"cluster.preemption_file={directory.parent}/notice-$NODE_NUMBER"
        command = [sys.executable, "-m", "raytrain_hpc", "train", *WORDS, *FOLLOWING, *throttle(5), *words]
        with self.out.open("a") as out:
            self.process = subprocess.Popen(
                [*command, "train.steps=100000", notice, f"run.dir={directory}"],
                env=cluster.env,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.out.read_text()

    def read_metrics(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        def is_fulfilled() -> bool:
            assert self.process.poll() is None, self.output
            return condition()

        wait_until(is_fulfilled, self.out, timeout_s=90)

    def wait_for_size(self, size: int) -> None:
        """Wait until two steps were trained on `size` ranks."""
        self.wait_until(lambda: [line["elastic/world_size"] for line in self.read_metrics()[-2:]] == [size, size])

    def announce_node(self, number: int) -> None:
        """Create the preemption notice of a node."""
        (self.directory.parent / f"notice-{number}").touch()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start(cluster: TwoNodeCluster, tmp_path: Path) -> Iterator[Callable[..., FollowingRun]]:
    runs: list[FollowingRun] = []

    def start_run(*words: str) -> FollowingRun:
        runs.append(FollowingRun(cluster, tmp_path / "run", *words))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


def test_a_run_follows_nodes_that_come_and_go(
    cluster: TwoNodeCluster, start: Callable[..., FollowingRun], pool: WarmPool, tmp_path: Path
) -> None:
    run = start("cluster.min_workers=2")
    missing = "waiting for nodes: cluster.min_workers=2: the cluster has 1 free CPU slots on 1 nodes: 3s of up to 2m00s"
    run.wait_until(lambda: missing in run.output)
    cluster.send("add")
    run.wait_for_size(3)
    cluster.send("add")
    run.wait_for_size(5)
    cluster.send("drain")
    cluster.send("lose")  # before the run has left it
    run.wait_for_size(3)
    for request, size in (("2", 2), ("auto", 3)):
        result = CliRunner().invoke(main, ["resize", str(run.directory), request])
        assert result.exit_code == 0 and result.output.endswith(f"\n{size} workers train\n"), result.output
        run.wait_for_size(size)
    run.wait_until(lambda: run.read_metrics()[-1]["step"] >= COMPARED_STEPS)
    run.announce_node(2)
    assert run.process.wait(timeout=60) == 3, run.output
    assert "nodes are draining and too few workers remain: saving and stopping" in run.output
    (incident,) = [json.loads(line) for line in (run.directory / "incidents.jsonl").read_text().splitlines()]
    assert (incident["kind"], incident["world_after"], incident["steps_lost"]) == ("preempted", 3, 0)
    metrics_of_step = {line["step"]: line for line in run.read_metrics()}
    sizes = [metrics_of_step[step]["elastic/world_size"] for step in sorted(metrics_of_step)]
    changes = [(before, after) for before, after in pairwise(sizes) if before != after]
    assert changes == [(3, 5), (5, 3), (3, 2), (2, 3)], "both workers of a node join at once"
    one_process = make_small_config(None, *WORDS, "cluster.workers=1", f"run.dir={tmp_path}/one")
    reference = [curve_point(metrics) for metrics in get_step_metrics(pool.train(one_process)[0])]
    assert [curve_point(metrics_of_step[step]) for step in range(1, COMPARED_STEPS + 1)] == reference


def test_axes_left_to_the_planner_are_chosen_again(
    cluster: TwoNodeCluster, start: Callable[..., FollowingRun], pool: WarmPool, tmp_path: Path
) -> None:
    """Two microbatches are too few for more than two workers, unless pairs of them share a replica.

    The state is resharded in memory.
    """
    words = ["train.global_batch_size=2", "train.micro_batch_size=1", "train.dtype=fp64", "train.deterministic=false"]
    run = start(*words, "parallel.tp=[1,2]")
    run.wait_for_size(2)
    cluster.send("add")
    run.wait_for_size(4)
    workers = json.loads((run.directory / "workers.json").read_text())["workers"]
    assert [worker["coordinates"]["tp"] for worker in workers] == [0, 1, 0, 1]
    run.wait_until(lambda: run.read_metrics()[-1]["step"] >= COMPARED_STEPS)
    run.process.terminate()
    assert run.process.wait(timeout=60) == 3, run.output
    metrics = run.read_metrics()
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1)), "no step is lost"
    one_process = make_small_config(None, *WORDS, *words, "cluster.workers=1", f"run.dir={tmp_path}/one")
    one_process.train.steps = len(metrics)
    reference = [line["train/loss"] for line in get_step_metrics(pool.train(one_process)[0])]
    assert [line["train/loss"] for line in metrics] == pytest.approx(reference, rel=1e-8)
