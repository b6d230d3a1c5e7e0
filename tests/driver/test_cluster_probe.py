"""Facts and collective timings of a cluster's workers, and the report of `doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.bench.comm import build_table
from raytrain_hpc.cli.doctor import examine_cluster, run_checks
from raytrain_hpc.driver.cluster_probe import group_workers_by_scope
from raytrain_hpc.planner.link_fit import BUS_FACTORS
from tests.warm_pool import make_small_config

pytestmark = pytest.mark.timeout(200)
HOST_INFO: dict[str, Any] = {
    "node": "h1",
    "node_id": "n1",
    "host": "h1",
    "pid": 1,
    "address": "10.0.0.1",
    "device": "cpu",
    "python": "3.12.1",
    "versions": {"torch": "2.13.0", "ray": "2.60.0"},
    "time": 100.0,
    "shared_memory_free": 8 << 30,
    "open_files": 65536,
    "sees_directory": True,
    "tflops": 0.1,
    "memory_gbs": 10.0,
}


def test_workers_are_grouped_by_scope() -> None:
    assert group_workers_by_scope(["a", "a", "b", "b"]) == {
        "inside a node": [0, 1],
        "across nodes": [0, 2],
        "all": [0, 1, 2, 3],
    }
    assert group_workers_by_scope(["a", "a"]) == {"inside a node": [0, 1]}
    assert group_workers_by_scope(["a", "b", "c"]) == {"across nodes": [0, 1, 2]}
    assert group_workers_by_scope(["a"]) == {}


def test_doctor_on_a_cluster(ray_cluster: None, tmp_path: Path) -> None:
    run_dir = tmp_path / "not there yet" / "run"
    report = examine_cluster(make_small_config(run_dir, "cluster.workers=3"))
    assert {check.name: check.state for check in report.checks if check.state == "fail"} == {}
    assert report.is_healthy and not run_dir.parent.exists(), "nothing is written"
    (timings,) = report.timings
    assert (timings.scope, timings.ranks, timings.nodes) == ("inside a node", 3, 1)
    assert timings.seconds.keys() == BUS_FACTORS.keys()
    assert all(took > 0 for seconds in timings.seconds.values() for took in seconds.values())
    text = "\n".join(report.format_lines())
    assert "run.dir" in text and "all_to_all" in text and "3 workers on 1 node" in text
    assert json.loads(json.dumps(report.to_json()))["collectives"][0]["ranks"] == 3
    table = build_table(list(report.timings))
    assert [row["operation"] for row in table.rows] == list(BUS_FACTORS)
    assert all(row["GB/s"] > 0 for row in table.rows)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "name", "state", "expected_text"),
    [
        ({"versions": {"torch": "2.12.0", "ray": "2.60.0"}}, "versions", "fail", "torch 2.12.0 and 2.13.0"),
        ({"python": "3.11.9"}, "versions", "fail", "python 3.11.9 and 3.12.1"),
        ({"time": 130.0}, "clocks", "warn", "28.00 s apart"),
        ({"shared_memory_free": 64 << 20}, "/dev/shm", "warn", "node h2"),
        ({"open_files": 1024}, "open files", "warn", "limit 1024"),
        ({"sees_directory": False}, "run.dir", "fail", "not the same directory on h2"),
        ({"address": "127.0.0.1"}, "network", "fail", "127.0.0.1"),
        ({"tflops": 0.05}, "arithmetic", "warn", "slowest 0.05"),
        ({"memory_gbs": 3.0}, "memory", "warn", "slowest 3"),
    ],
)
def test_doctor_reports_a_worker_that_differs(
    changes: dict[str, Any], name: str, state: str, expected_text: str
) -> None:
    others = [HOST_INFO, {**HOST_INFO, "pid": 2}]
    assert {check.state for check in run_checks(others, (99.0, 102.0), "/runs")} == {"ok"}
    checks = run_checks(
        [*others, {**HOST_INFO, "node": "h2", "node_id": "n2", "host": "h2", **changes}], (99.0, 102.0), "/runs"
    )
    (check,) = [check for check in checks if check.state != "ok"]
    assert (check.name, check.state) == (name, state)
    assert expected_text in check.found and check.remedy
