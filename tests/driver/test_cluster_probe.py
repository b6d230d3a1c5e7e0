"""Facts and collective timings of a cluster's workers, and the report of `doctor`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_hpc.bench.comm import build_table
from raytrain_hpc.cli.cluster_checks import run_checks
from raytrain_hpc.cli.doctor import _marker_file, examine_cluster
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.cpu_limits import read_cpu_limits
from raytrain_hpc.driver.cluster_probe import group_workers_by_scope, inspect_running_cluster
from raytrain_hpc.driver.ray_cluster import connect_ray
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.observability.console import Console
from raytrain_hpc.planner.link_fit import BUS_FACTORS
from raytrain_hpc.planner.topology import Node, Topology
from raytrain_hpc.storage.object_path import ObjectPath
from raytrain_hpc.worker.directory_access import check_directory_access
from tests.storage.s3_server import S3Server
from tests.warm_pool import make_small_config

pytestmark = pytest.mark.timeout(200)
HOST_INFO: dict[str, Any] = {
    "node": "h1",
    "node_id": "n1",
    "host": "h1",
    "pid": 1,
    "address": "10.0.0.1",
    "rack": "",
    "numa_node": None,
    "is_bound": False,
    "adapters": [{"name": "mlx5_0", "is_up": True, "gbits": 400.0, "numa_node": 0}],
    "device": "cpu",
    "memory_gib": None,
    "python": "3.12.1",
    "versions": {"torch": "2.13.0", "ray": "2.60.0"},
    "time": 100.0,
    "cpus": {"installed": 64, "affinity": 8, "quota": None, "usable": 8},
    "installed_gpus": 0,
    "accelerator_build": "CUDA 12.8",
    "shared_memory_free": 8 << 30,
    "shared_memory_total": 16 << 30,
    "socket_path": "/tmp/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store",
    "reaches_driver": True,
    "open_files": 65536,
    "directory": {"problem": "", "upload_mbs": 0.0, "download_mbs": 0.0},
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


def test_no_cluster_is_started_to_be_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: Any) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterError, match=r"no Ray cluster is running .*cluster\.address.*--workers 8"):
        inspect_running_cluster(load_config(None, ["cluster.address=local"]))


def test_which_cluster_is_used_is_reported(ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    with connect_ray(load_config(), 1, Console().print_notice):
        pass
    with connect_ray(load_config(), 1, Console(quiet=True).print_notice):
        pass
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "ray     the cluster of this process: 8 CPUs, 0 GPUs\n")


def test_doctor_on_a_cluster(ray_cluster: None, tmp_path: Path) -> None:
    run_dir = tmp_path / "not there yet" / "run"
    report = examine_cluster(make_small_config(run_dir, "cluster.workers=3"))
    assert {check.name: check.state for check in report.checks if check.state == "fail"} == {}
    assert report.is_healthy and not run_dir.parent.exists(), "nothing is written"
    (timings,) = report.timings
    assert (timings.scope, timings.ranks, timings.nodes) == ("inside a node", 3, 1)
    assert timings.seconds.keys() == BUS_FACTORS.keys()
    assert all(took > 0 for seconds in timings.seconds.values() for took in seconds.values())
    lines = list(report.format_lines())
    text = "\n".join(lines)
    assert len(report.checks) == lines.index(""), "one line per check"
    cpus = read_cpu_limits()
    assert f"{cpus.installed} installed, {cpus.affinity} in the affinity mask" in text
    assert f"RAY_TMPDIR={os.environ.get('RAY_TMPDIR', '/tmp')}" in text
    assert "run.dir" in text and "all_to_all" in text and "3 workers on 1 node" in text
    assert json.loads(json.dumps(report.to_json()))["collectives"][0]["ranks"] == 3
    table = build_table(list(report.timings))
    assert [row["operation"] for row in table.rows] == list(BUS_FACTORS)
    assert all(row["GB/s"] > 0 for row in table.rows)  # type: ignore[operator]


# Facts of the third worker that differ, and the check that reports them.
PROBLEMS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"versions": {"torch": "2.12.0", "ray": "2.60.0"}}, "versions", "fail", "torch 2.12.0 and 2.13.0"),
    ({"python": "3.11.9"}, "versions", "fail", "python 3.11.9 and 3.12.1"),
    (
        {"cpus": {"installed": 64, "affinity": 64, "quota": 1.5, "usable": 1}},
        "cpus",
        "warn",
        "1 usable for 1 workers of 2 threads on node h2 (64 installed, 64 in the affinity mask, cgroup quota 1.5)",
    ),
    ({"installed_gpus": 4}, "gpus", "warn", "node h2 has 4, but Ray offers none"),
    ({"installed_gpus": 4, "accelerator_build": ""}, "gpus", "warn", "torch 2.13.0 is built for CPUs only"),
    ({"time": 130.0}, "clocks", "warn", "28.00 s apart"),
    ({"shared_memory_free": 64 << 20}, "/dev/shm", "warn", "0.1 of 16.0 GiB free at the minimum (node h2)"),
    (
        {"socket_path": f"/{'d' * 40}/ray/session_2026-01-01_00-00-00_000000_12/sockets/plasma_store"},
        "sockets",
        "warn",
        f"paths of 104 bytes, at most 107 are possible (RAY_TMPDIR=/{'d' * 40})",
    ),
    ({"open_files": 1024}, "open files", "warn", "limit 1024"),
    ({"directory": {"problem": "No such file or directory"}}, "run.dir", "fail", "not the same directory on h2"),
    ({"address": "127.0.0.1"}, "network", "fail", "127.0.0.1"),
    ({"reaches_driver": False}, "ports", "fail", "workers on h2 cannot connect to the driver"),
    ({"numa_node": 1}, "numa", "warn", "workers on h2 are not on the CPUs of theirs"),
    (
        {"adapters": [{"name": "mlx5_0", "is_up": False, "gbits": 10.0, "numa_node": 0}]},
        "adapters",
        "warn",
        "per host: 1 of 400 Gbit/s; down: mlx5_0 on h2",
    ),
    (
        {"adapters": [{"name": "eth0", "is_up": True, "gbits": 25.0, "numa_node": 0}]},
        "adapters",
        "warn",
        "other ones on 1 hosts, such as h2: 1 of 25 Gbit/s",
    ),
    ({"tflops": 0.05}, "arithmetic", "warn", "slowest 0.05"),
    ({"memory_gbs": 3.0}, "memory", "warn", "slowest 3"),
]
CLUSTER = Topology((Node("n1", "10.0.0.1", 4), Node("n2", "10.0.0.2", 4)), "cpu")


def check_facts(*facts: dict[str, Any]) -> list[Any]:
    """Return the checks that are not ok."""
    config = load_config(None, ["run.dir=/runs", "cluster.cpu_threads=2"])
    return [check for check in run_checks(CLUSTER, facts, (99.0, 102.0), config) if check.state != "ok"]


@pytest.mark.parametrize(("changes", "name", "state", "expected_text"), PROBLEMS)
def test_doctor_reports_a_worker_that_differs(
    changes: dict[str, Any], name: str, state: str, expected_text: str
) -> None:
    others = [HOST_INFO, {**HOST_INFO, "pid": 2}]
    assert check_facts(*others) == []
    (check,) = check_facts(*others, {**HOST_INFO, "node": "h2", "node_id": "n2", "host": "h2", **changes})
    assert (check.name, check.state) == (name, state)
    line = check.format_line()
    assert expected_text in line and line.endswith(f" -> {check.remedy}") and check.remedy and "\n" not in line


def test_doctor_names_versions_that_are_not_supported() -> None:
    (check,) = check_facts({**HOST_INFO, "versions": {"torch": "2.10.1+cu128", "ray": "2.60.0"}})
    assert (check.name, check.state) == ("versions", "warn") and check.remedy.startswith("install torch")
    (check,) = check_facts({**HOST_INFO, "versions": {"torch": "2.13.0+cu128", "ray": "2.40.0"}})
    assert check.remedy.startswith("install ray") and ">=2.50" in check.remedy


def test_doctor_names_gpus() -> None:
    h100 = {**HOST_INFO, "device": "H100", "memory_gib": 79.1, "installed_gpus": 2}
    assert check_facts(h100, h100) == []
    (check,) = check_facts(h100, h100, {**h100, "device": "A100", "memory_gib": 39.4})
    assert check.found == "2 x H100, 1 x A100, 39 GiB at least" and "one model of GPU" in check.remedy


def test_doctor_names_numa_nodes_and_racks() -> None:
    facts = [{**HOST_INFO, "numa_node": node, "is_bound": True, "rack": "leaf7"} for node in (0, 1, 1)]
    config = load_config(None, ["run.dir=/runs"])
    checks = {check.name: check for check in run_checks(CLUSTER, facts, (99.0, 102.0), config)}
    expected = "devices of 2 NUMA nodes, 2 of node 1 on host h1; each worker is on the CPUs of its device"
    assert (checks["numa"].state, checks["numa"].found) == ("ok", expected)
    assert "racks leaf7" in checks["cluster"].found


def test_doctor_reports_access_to_a_bucket_and_its_speed(
    s3: S3Server, folder: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, [f"run.dir={folder}"])
    with _marker_file(config.run.dir) as (path, token):
        access = asdict(check_directory_access(path, token))
        denied = asdict(check_directory_access(path, "another token"))
        s3.delete(path.removeprefix("s3://training/"))
        missing = asdict(check_directory_access(path, token))
    assert s3.list_keys() == [] and access["problem"] == "" and access["upload_mbs"] > 1 < access["download_mbs"]
    assert denied["problem"] == "another file has its name" and missing["problem"] == "there is no such object"

    def check(*accesses: dict[str, Any]) -> str:
        facts = [{**HOST_INFO, "node": f"h{number}", "directory": each} for number, each in enumerate(accesses)]
        (line,) = [c.format_line() for c in run_checks(CLUSTER, facts, (99.0, 102.0), config) if c.name == "run.dir"]
        return line

    fast = {"problem": "", "upload_mbs": 250.0, "download_mbs": 900.0}
    assert check(fast, {**fast, "upload_mbs": 99.0}) == (
        f"ok    run.dir      {folder} honours conditional writes; per worker at least 99 MB/s up, 900 MB/s down"
    )
    monkeypatch.setattr("raytrain_hpc.storage.unfinished_uploads.find_spec", lambda name: None)  # without boto3
    assert check(fast).startswith("warn  run.dir ") and "install boto3" in check(fast)
    assert f"fail  run.dir      {folder} cannot be used from h1 (there is no such object) -> set the cred" in check(
        fast, missing
    )
