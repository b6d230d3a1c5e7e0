"""How a host is wired, by copies of the kernel's files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from raytrain_hpc.cpu_limits import keep_cpu_count, read_cpu_limits
from raytrain_hpc.worker.host_topology import (
    Adapter,
    bind_to_numa_node,
    find_numa_node,
    find_switch,
    list_adapters,
    parse_cpu_list,
    read_cpus_of_node,
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3", {0, 1, 2, 3}), ("0,2-3,8\n", {0, 2, 3, 8}), ("", set()), ("\n", set()), ("7", {7})]
)
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_numa_nodes_of_devices(tmp_path: Path) -> None:
    write(tmp_path / "bus/pci/devices/0000:18:00.0/numa_node", "1")
    write(tmp_path / "bus/pci/devices/0000:19:00.0/numa_node", "-1")
    write(tmp_path / "devices/system/node/node1/cpulist", "32-33,96-97")
    assert [find_numa_node(f"0000:{bus}:00.0", tmp_path) for bus in ("18", "19", "20")] == [1, None, None]
    assert read_cpus_of_node(1, tmp_path) == {32, 33, 96, 97} and read_cpus_of_node(2, tmp_path) == set()


@pytest.fixture
def two_cpus() -> set[int]:
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("needs two CPUs")
    return set(sorted(usable)[:2])


def bind_in_child(numa_node: int, sysfs: Path) -> tuple[bool, list[set[int]]]:
    """Bind a child process that has a second thread; return the result and the CPUs of each of its threads."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        done = threading.Event()
        threading.Thread(target=done.wait, daemon=True).start()
        is_bound = bind_to_numa_node(numa_node, sysfs)
        masks = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
        os.write(writer, repr((is_bound, masks)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        is_bound, masks = eval(stream.read())
    os.waitpid(pid, 0)
    return is_bound, [set(mask) for mask in masks]


def test_all_threads_move_to_the_cpus_of_a_node(tmp_path: Path, two_cpus: set[int]) -> None:
    first, second = sorted(two_cpus)
    write(tmp_path / "devices/system/node/node0/cpulist", f"{second},4096")  # one that this process may not use
    write(tmp_path / "devices/system/node/node1/cpulist", "4096-4100")
    write(tmp_path / "devices/system/node/node2/cpulist", f"{second},4096-4100")  # a single one of many
    assert bind_in_child(0, tmp_path) == (True, [{second}, {second}])
    for numa_node in (1, 2, 3):
        is_bound, masks = bind_in_child(numa_node, tmp_path)
        assert not is_bound and all(two_cpus <= mask for mask in masks), "nothing has changed"
    assert first in os.sched_getaffinity(0), "this process is as before"


def test_a_system_that_refuses_leaves_the_process_unbound(
    tmp_path: Path, two_cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "devices/system/node/node0/cpulist", f"{min(two_cpus)}")

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert not bind_to_numa_node(0, tmp_path)


def test_a_bound_process_still_counts_the_cpus_of_the_host(two_cpus: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_cpu_limits()
    keep_cpu_count(environment := {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert read_cpu_limits().affinity == 1
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert read_cpu_limits() == before


def add_interface(sysfs: Path, name: str, state: str, speed: str, *, is_device: bool = True) -> None:
    write(sysfs / "class/net" / name / "operstate", state)
    write(sysfs / "class/net" / name / "speed", speed)
    if is_device:
        write(sysfs / "class/net" / name / "device/numa_node", "0")


def test_adapters_of_a_host(tmp_path: Path) -> None:
    for number, state in enumerate(("4: ACTIVE", "1: DOWN")):
        port = tmp_path / f"class/infiniband/mlx5_{number}/ports/1"
        write(port / "state", state)
        write(port / "rate", "400 Gb/sec (4X NDR)" if number == 0 else "10 Gb/sec (4X SDR)")
        write(tmp_path / f"class/infiniband/mlx5_{number}/device/numa_node", str(number))
    for port in ("1", "2"):
        write(tmp_path / "class/infiniband/mlx5_9/ports" / port / "state", "4: ACTIVE")
        write(tmp_path / "class/infiniband/mlx5_9/ports" / port / "rate", "100 Gb/sec (4X EDR)")
    add_interface(tmp_path, "eth0", "up", "25000")
    add_interface(tmp_path, "eth1", "down", "-1")
    add_interface(tmp_path, "hsn0", "up", "-1")
    add_interface(tmp_path, "lo", "unknown", "", is_device=False)
    assert list_adapters(tmp_path) == [
        Adapter("mlx5_0", True, 400.0, 0),
        Adapter("mlx5_1", False, 10.0, 1),
        Adapter("mlx5_9:1", True, 100.0, None),
        Adapter("mlx5_9:2", True, 100.0, None),
        Adapter("eth0", True, 25.0, 0),
        Adapter("hsn0", True, 0.0, 0),
    ]
    assert list_adapters(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("pattern", "address", "switch"),
    [
        ("switch.switch.node", "core.leaf7.node12", "leaf7"),
        ("switch.node", "rack[3].node12", "rack_3_"),
        ("node", "node12", ""),
        ("switch.node", "", ""),
    ],
)
def test_the_switch_above_a_node_by_slurm(pattern: str, address: str, switch: str) -> None:
    environ = {"SLURM_TOPOLOGY_ADDR_PATTERN": pattern, "SLURM_TOPOLOGY_ADDR": address}
    assert find_switch(environ) == switch and find_switch({}) == ""
