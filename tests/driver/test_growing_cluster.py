"""A run that follows its cluster: it waits for nodes, uses those that join, and leaves those that are announced to go.

The losses of all steps are bit for bit those of one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_hpc.cli.main import main
from tests.driver.following_run import FOLLOWING, WORDS, FollowingRun, train_in_one_process
from tests.driver.throttle import throttle
from tests.driver.two_node_cluster import TwoNodeCluster
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

pytestmark = pytest.mark.timeout(240)

COMPARED_STEPS = 60


@pytest.fixture(scope="module")
def cluster(ray_python: Path) -> Iterator[TwoNodeCluster]:
    nodes = TwoNodeCluster(cpus=[1], python=ray_python)
    yield nodes
    nodes.close()


@pytest.fixture
def start(cluster: TwoNodeCluster, tmp_path: Path) -> Iterator[Callable[..., FollowingRun]]:
    runs: list[FollowingRun] = []

    def start_run(*words: str) -> FollowingRun:
        settings = [*FOLLOWING, "cluster.resize_interval=2", *throttle(5), "train.steps=100000", *words]
        notice = f"cluster.preemption_file={tmp_path}/notice-$NODE_NUMBER"
        runs.append(FollowingRun(cluster, tmp_path / "run", notice, *settings))
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
    (tmp_path / "notice-2").touch()
    assert run.process.wait(timeout=60) == 3, run.output
    assert "nodes are draining and too few workers remain: saving and stopping" in run.output
    (incident,) = [json.loads(line) for line in (run.directory / "incidents.jsonl").read_text().splitlines()]
    assert (incident["kind"], incident["world_after"], incident["steps_lost"]) == ("preempted", 3, 0)
    sizes = [(before["elastic/world_size"], after["elastic/world_size"]) for before, after in run.find_changes()]
    assert sizes == [(3, 5), (5, 3), (3, 2), (2, 3)], "both workers of a node join at once"
    assert run.read_curve(COMPARED_STEPS) == train_in_one_process(pool, tmp_path / "one", COMPARED_STEPS)


def test_axes_left_to_the_planner_are_chosen_again(
    cluster: TwoNodeCluster, start: Callable[..., FollowingRun], pool: WarmPool, tmp_path: Path
) -> None:
    """Two microbatches are too few for more than two workers, unless pairs of them share a replica.

    The state is resharded in memory.
    """
    words = ["train.global_batch_size=2", "train.micro_batch_size=1", "train.dtype=fp64", "train.deterministic=false"]
    if cluster.num_nodes == 1:  # no other test has added one
        cluster.send("add")
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
