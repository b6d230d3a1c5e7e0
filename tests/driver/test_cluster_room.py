"""Room of a cluster for a run, the wait for more nodes, and the view of a cluster that a run follows. Without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver import capacity_view, cluster_room, wait_report
from raytrain_hpc.driver.capacity_view import CapacityView
from raytrain_hpc.driver.cluster_monitor import ClusterMonitor, ClusterSnapshot, NodeSlots
from raytrain_hpc.driver.cluster_room import ClusterRoom, find_room, wait_for_room
from raytrain_hpc.driver.ray_topology import resolve_world_size
from raytrain_hpc.elastic.cluster_following import NodeCapacity
from raytrain_hpc.elastic.device_allocation import Allowance
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.topology import Node, Topology
from tests.driver.cli_process import wait_until

SetNodes = Callable[..., None]


def make_topology(*slots: int, device: str = "cuda") -> Topology:
    nodes = tuple(Node(f"n{number}", "10.0.0.1", count) for number, count in enumerate(slots))
    return Topology(nodes, device, "h100" if device == "cuda" else "")


@pytest.fixture
def set_nodes(monkeypatch: pytest.MonkeyPatch) -> SetNodes:
    """A function that sets the slots of the nodes that Ray reports, and how many of them other jobs hold."""

    def set_slots(*slots: int, held: int = 0, device: str = "cuda") -> None:
        topology = make_topology(*slots, device=device)
        free = {node.id: {topology.ray_resource: float(node.slots - held)} for node in topology.nodes}
        monkeypatch.setattr(cluster_room, "read_topology", lambda config: topology)
        monkeypatch.setattr(cluster_room, "get_free_resources", lambda: free)

    return set_slots


def find(*words: str, is_shared: bool = True) -> ClusterRoom:
    return find_room(load_config(None, ["train.global_batch_size=24", *words]), is_shared=is_shared)


@pytest.mark.parametrize(
    ("words", "world_size", "start_count", "follows"),
    [
        ([], 8, 8, True),
        (["cluster.max_workers=5"], 5, 5, True),
        (["cluster.spares=2"], 6, 8, True),
        (["cluster.workers=4"], 4, 4, False),
        (["cluster.workers=12", "cluster.min_workers=6"], 12, 8, False),
        (["parallel.dp_replicate=4"], 4, 4, False),
    ],
)
def test_room_of_two_nodes(
    set_nodes: SetNodes, words: list[str], world_size: int, start_count: int, follows: bool
) -> None:
    set_nodes(4, 4)
    room = find(*words)
    assert (room.world_size, room.start_count, room.follows) == (world_size, start_count, follows)


def test_slots_of_other_jobs_are_no_room_for_a_run_that_follows(set_nodes: SetNodes) -> None:
    set_nodes(4, 4, held=1)
    assert find().start_count == 6
    assert find(is_shared=False).world_size == 8, "a Ray of its own has no other jobs"


@pytest.mark.parametrize(
    ("words", "devices", "start_count"),
    [
        ([], 3, 3),
        ([], 0, None),
        (["cluster.workers=4"], 4, 4),
        (["cluster.workers=4"], 3, None),
        (["cluster.workers=4", "cluster.min_workers=2"], 3, 3),
    ],
)
def test_a_run_starts_within_its_allowance(
    set_nodes: SetNodes, words: list[str], devices: int, start_count: int | None
) -> None:
    set_nodes(4, 4)
    config = load_config(None, ["train.global_batch_size=24", *words])
    allowance = Allowance(devices, "run other of priority 5")
    if start_count is None:
        with pytest.raises(ClusterError, match=f"may have {devices} of . GPU slots, run other of priority 5 has the"):
            find_room(config, is_shared=True, allowance=allowance)
    else:
        assert find_room(config, is_shared=True, allowance=allowance).start_count == start_count


@pytest.mark.parametrize(
    ("words", "world_size"),
    [([], 2), (["cluster.cpus_per_worker=1"], 9), (["cluster.cpus_per_worker=1", "cluster.workers=3"], 3)],
)
def test_workers_on_cpus(words: list[str], world_size: int) -> None:
    assert resolve_world_size(load_config(None, words), make_topology(5, 4, device="cpu")) == world_size


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["cluster.workers=12"], "cluster.workers=12: the cluster has 8 free GPU slots on 2 nodes"),
        (["cluster.workers=12", "cluster.min_workers=9"], "cluster.workers=12: the cluster has 8 free GPU slots"),
        (["cluster.min_workers=9"], "cluster.min_workers=9: the cluster has 8 free GPU slots on 2 nodes"),
    ],
)
def test_a_cluster_that_is_too_small(set_nodes: SetNodes, words: list[str], problem: str) -> None:
    set_nodes(4, 4)
    with pytest.raises(ClusterError, match=problem):
        find(*words)


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_report, "_FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(cluster_room, "_POLL_INTERVAL_S", 0.01)


@pytest.mark.usefixtures("short_delays")
def test_nodes_are_waited_for_with_a_line(set_nodes: SetNodes) -> None:
    set_nodes(4)
    lines: list[str] = []

    def print_line(line: str) -> None:
        lines.append(line)
        set_nodes(4, 4)

    config = load_config(None, ["cluster.workers=8", "train.global_batch_size=24"])
    room = wait_for_room(config, is_shared=True, print_line=print_line, stop_event=threading.Event())
    assert room.start_count == 8
    problem = "cluster.workers=8: the cluster has 4 free GPU slots on 1 nodes"
    assert lines == [f"waiting for nodes: {problem}: 0s of up to 2m00s (cluster.start_timeout)"]


@pytest.mark.usefixtures("short_delays")
@pytest.mark.parametrize("end", ["timeout", "stop", "own Ray"])
def test_the_wait_for_nodes_ends(set_nodes: SetNodes, end: str) -> None:
    set_nodes(4)
    stop_event = threading.Event()
    timeout = 0.1 if end == "timeout" else 60
    config = load_config(None, ["cluster.workers=8", f"cluster.start_timeout={timeout}", "train.global_batch_size=24"])
    print_line = (lambda line: stop_event.set()) if end == "stop" else (lambda line: None)
    with pytest.raises(ClusterError, match="use cluster.workers=4 or add nodes"):
        wait_for_room(config, is_shared=end != "own Ray", print_line=print_line, stop_event=stop_event)


class FakePool:
    """The slots of a run, and the nodes that it was told to leave."""

    def __init__(self, **held: int):
        self.held, self.left, self.reserved_at = held, [], 0.0
        self.drain_monitor = SimpleNamespace(get_draining_nodes=lambda: frozenset({"draining"}))

    def count_slots_by_node(self) -> dict[str, int]:
        return self.held

    def get_reservation_time(self, node_id: str) -> float:
        return self.reserved_at

    def leave_node(self, node_id: str) -> None:
        self.left.append(node_id)


def make_view(pool: Any, snapshot: ClusterSnapshot) -> CapacityView:
    return CapacityView(SimpleNamespace(snapshot=snapshot), pool)  # type: ignore[arg-type]


def test_capacity_of_the_nodes_of_a_shared_cluster() -> None:
    pool = FakePool(a=2, gone=1)
    nodes = (NodeSlots("a", 4, 1), NodeSlots("b", 4, 4), NodeSlots("draining", 4, 4))
    assert make_view(pool, ClusterSnapshot(nodes, time=100.0)).update() == (
        NodeCapacity("a", 2, 1),
        NodeCapacity("b", 0, 4),
        NodeCapacity("draining", 0, 4, is_draining=True),
    )
    assert pool.left == ["gone"]


def test_what_was_just_reserved_is_not_free() -> None:
    pool = FakePool(a=2, new=1)
    pool.reserved_at = 99.0
    view = make_view(pool, ClusterSnapshot((NodeSlots("a", 4, 2),), time=98.0))
    assert view.update() == (NodeCapacity("a", 2, 0),)
    assert pool.left == [], "the node of a new reservation is not in an older snapshot"


def test_a_lost_node_is_not_used_while_ray_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(capacity_view, "time", SimpleNamespace(monotonic=lambda: now[0]))
    view = make_view(FakePool(), ClusterSnapshot((NodeSlots("a", 4, 4),), time=1000.0))
    view.exclude_node("a")
    assert view.update() == ()
    now[0] += 61.0
    assert view.update() == (NodeCapacity("a", 0, 4),)


def test_the_monitor_reads_in_the_background_and_survives_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_hpc.driver.cluster_monitor._POLL_INTERVAL_S", 0.01)
    first = ClusterSnapshot((NodeSlots("a", 4, 4),), time=1.0)
    results: list[ClusterSnapshot | Exception] = [first, RuntimeError("no answer"), replace(first, time=2.0)]
    reported: list[float] = []

    def read() -> ClusterSnapshot:
        result = results.pop(0) if results else replace(first, time=3.0)
        if isinstance(result, Exception):
            raise result
        return result

    monitor = ClusterMonitor(read, lambda snapshot: reported.append(snapshot.time))
    try:
        assert reported[0] == 1.0
        wait_until(lambda: monitor.snapshot.time == 3.0 and reported[-1] == 3.0, timeout_s=10)
    finally:
        monitor.close()
