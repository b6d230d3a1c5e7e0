"""The network between two nodes is cut without closing a connection."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.driver.cli_process import curve_point, read_curve
from tests.driver.network_namespaces import NamespacedNodes, can_create_namespaces
from tests.driver.test_two_nodes import COMPARED_STEPS, ELASTIC, wait_until
from tests.driver.throttle import throttle
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not can_create_namespaces(), reason="needs the right to make network namespaces"),
]


@pytest.fixture
def nodes(ray_python: Path) -> Iterator[NamespacedNodes]:
    cluster = NamespacedNodes(ray_python)
    yield cluster
    cluster.close()


def test_partitioned_workers_exit_and_the_others_continue(
    nodes: NamespacedNodes, pool: WarmPool, tmp_path: Path
) -> None:
    """Train with a pipeline stage on each side; the lost stage's state is restored from replicas."""
    words, run_dir = [*ELASTIC, "cluster.workers=4", "parallel.pp=2"], tmp_path / "run"
    reference = get_step_metrics(pool.train(make_small_config(None, *words))[0])
    words += throttle(4)  # the network is cut long before the run would end
    command = nodes.on_first_node(sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *words)
    process = subprocess.Popen(
        command, env=nodes.env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_until(lambda metrics: len(metrics) >= 12, run_dir, process)
        workers = json.loads((run_dir / "workers.json").read_text())["workers"]
        lost_ranks = nodes.fail_second_node(workers)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    (incident,) = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    assert len(lost_ranks) == 2 and (incident["kind"], incident["ranks"]) == ("node lost", lost_ranks), output
    assert (incident["world"], incident["world_after"]) == (4, 2) and incident["steps_lost"] <= 1
    assert read_curve(run_dir, COMPARED_STEPS) == [curve_point(metrics) for metrics in reference]
    orphans = [
        psutil.Process(worker["pid"])
        for worker in workers
        if worker["rank"] in lost_ranks and psutil.pid_exists(worker["pid"])
    ]
    file_times = read_file_times(run_dir)
    nodes.heal()
    assert not psutil.wait_procs(orphans, timeout=60)[1], "the lost workers exit and do not rejoin"
    assert read_file_times(run_dir) == file_times


def read_file_times(directory: Path) -> dict[str, float]:
    """Return the modification time of each file."""
    time.sleep(0.5)
    return {str(path): path.stat().st_mtime for path in directory.rglob("*") if path.is_file()}
