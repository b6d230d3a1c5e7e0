"""Membership planner: when a generation can be formed, and when the running one is ended to regroup."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver import membership_planner, worker_target
from raytrain_hpc.driver.local_backend import LocalWorkerGroup
from raytrain_hpc.driver.membership_planner import MembershipPlanner
from raytrain_hpc.driver.worker_target import WorkerTarget
from raytrain_hpc.elastic.cluster_following import ARRIVAL_PATIENCE_S, NodeCapacity
from raytrain_hpc.elastic.device_allocation import UNLIMITED, Allowance
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.errors import ClusterError, RunFailedError
from raytrain_hpc.planner.layout import Batching


class Workers:
    """A worker group of fake workers, to which no further worker comes."""

    def __init__(self, *candidates: Candidate):
        self.candidates, self.waits, self.targets = list(candidates), [], []
        self.capacity: tuple[NodeCapacity, ...] | None = None
        self.allowance = UNLIMITED

    def list_candidates(self) -> list[Candidate]:
        return list(self.candidates)

    def wait_for_workers(self, count: int, timeout_s: float | None = None) -> None:
        self.waits.append(count)
        raise ClusterError("no slots")

    def get_capacity(self) -> tuple[NodeCapacity, ...] | None:
        return self.capacity

    def get_allowance(self) -> Allowance:
        return self.allowance

    def scale_up_to(self, count: int, wanted: int | None = None) -> None:
        self.targets.append(count)


def make_candidates(count: int, *parts: StatePart) -> list[Candidate]:
    return [Candidate(number, f"node{number}", 100 + number, parts) for number in range(count)]


def make_planner(workers: Any, target: int, *overrides: str) -> tuple[MembershipPlanner, threading.Event, list[str]]:
    stop, lines = threading.Event(), []
    config = load_config(None, ["train.global_batch_size=12", "cluster.min_workers=2", *overrides])
    worker_target, batching = WorkerTarget(config, lines.append), Batching(6, 2)
    chooser = SimpleNamespace(find_size=lambda limit, nodes: 0, get=lambda size: None, has_choice=False)
    worker_target.begin(config, batching, target, None if workers.get_capacity() is None else chooser)
    arguments = (config, batching, lambda layout, batching: {}, workers, worker_target, lines.append, stop)
    return MembershipPlanner(*arguments), stop, lines


def test_state_in_memory_starts_a_smaller_generation_at_once() -> None:
    workers = Workers(*make_candidates(2, StatePart(1, 0, 1, 7)))
    membership = make_planner(workers, 3)[0].wait_for_membership()
    assert (membership.layout.world_size, membership.step, workers.waits) == (2, 7, [])


def test_without_state_in_memory_the_target_is_waited_for() -> None:
    workers = Workers(*make_candidates(2))
    membership = make_planner(workers, 3)[0].wait_for_membership()
    assert (membership.layout.world_size, membership.step, workers.waits) == (2, None, [3])


def test_too_few_workers_end_the_run() -> None:
    with pytest.raises(RunFailedError, match="too few workers to continue: no slots"):
        make_planner(Workers(*make_candidates(1)), 3)[0].wait_for_membership()


def test_one_process_continues_alone_when_more_workers_are_asked_for() -> None:
    workers = LocalWorkerGroup(torch.device("cpu"))
    membership = make_planner(workers, 2, "cluster.min_workers=1")[0].wait_for_membership()
    assert membership.layout.world_size == 1
    with pytest.raises(ClusterError, match="cluster.workers=0 trains in one process; 2 workers need a Ray cluster"):
        workers.wait_for_workers(2)


@pytest.mark.parametrize("overrides, expected", [([], "pause"), (["parallel.zero=1"], "save")])
def test_a_draining_member_ends_the_generation(overrides: list[str], expected: str) -> None:
    """With a partitioned state only a checkpoint is sure to hold it all."""
    workers = Workers(*make_candidates(3))
    planner, stop, _ = make_planner(workers, 3, *overrides)
    planner.begin_generation(planner.wait_for_membership())
    assert planner.poll_regroup() is None and workers.targets == [3]
    workers.candidates[1] = replace(workers.candidates[1], is_draining=True)
    assert planner.poll_regroup() == expected
    assert planner.poll_regroup() is None, "nothing has changed since"
    assert not stop.is_set()


def test_draining_nodes_that_leave_too_few_workers_stop_the_run() -> None:
    workers = Workers(*make_candidates(2))
    planner, stop, lines = make_planner(workers, 2)
    planner.begin_generation(planner.wait_for_membership())
    workers.candidates[0] = replace(workers.candidates[0], is_draining=True)
    assert planner.poll_regroup() is None and stop.is_set()
    assert lines == ["nodes are draining and too few workers remain: saving and stopping"]


@pytest.mark.parametrize("overrides, expected", [([], "pause"), (["parallel.offload=disk"], "save")])
def test_new_workers_end_the_generation(overrides: list[str], expected: str) -> None:
    """State that is offloaded to disk does not fit into memory, so that it is saved."""
    workers = Workers(*make_candidates(2, StatePart(1, 0, 1, 7)))
    planner, _, lines = make_planner(workers, 3, *overrides, "parallel.offload_dir=scratch")
    planner.begin_generation(planner.wait_for_membership())
    assert planner.poll_regroup() is None
    workers.candidates = make_candidates(3)
    assert planner.poll_regroup() == expected and lines == []
    planner.begin_generation(planner.wait_for_membership())
    assert lines == ["workers: 1 more joined; 3 train now"]


def test_a_slow_rank_is_given_fewer_microbatches() -> None:
    workers = Workers(*make_candidates(2))
    planner, _, _ = make_planner(workers, 2, "fault.on_straggler=rebalance")
    planner.begin_generation(planner.wait_for_membership())
    workers.candidates[1] = replace(workers.candidates[1], slowdown=2.0)
    assert planner.poll_regroup() == "pause"
    batching = planner.begin_generation(planner.wait_for_membership())
    assert [len(rank) for rank in batching.split_by_rank(2)] == [4, 2]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the target reads, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(worker_target, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_run_that_follows_its_cluster_grows_once_per_interval(clock: list[float]) -> None:
    workers = Workers(*make_candidates(2, StatePart(1, 0, 1, 7)))
    workers.capacity = (NodeCapacity("n0", 2, 0),)
    planner, _, lines = make_planner(workers, 2, "cluster.resize_interval=60")
    planner.begin_generation(planner.wait_for_membership())
    assert planner.poll_regroup() is None
    workers.capacity = (NodeCapacity("n0", 2, 0), NodeCapacity("n1", 0, 2))
    assert planner.poll_regroup() is None and workers.targets[-1] == 4
    assert lines == ["cluster: room for 4 workers on 2 nodes; 4 wanted, 2 train"]
    workers.candidates = make_candidates(3, StatePart(1, 0, 1, 7))
    assert planner.poll_regroup() is None, "the first of two new workers waits for the other"
    workers.candidates = make_candidates(4, StatePart(1, 0, 1, 7))
    assert planner.poll_regroup() == "pause"
    planner.begin_generation(planner.wait_for_membership())
    workers.capacity += (NodeCapacity("n2", 0, 2),)
    workers.candidates = make_candidates(6, StatePart(1, 0, 1, 7))
    assert planner.poll_regroup() is None, "within the interval"
    clock[0] += 59.0
    assert planner.poll_regroup() is None
    clock[0] += 1.0
    assert planner.poll_regroup() == "pause"


def test_losses_and_replacements_do_not_wait_for_the_interval(clock: list[float]) -> None:
    workers = Workers(*make_candidates(2, StatePart(1, 0, 1, 7)))
    workers.capacity = (NodeCapacity("n0", 2, 0), NodeCapacity("n1", 2, 0))
    planner, _, _ = make_planner(workers, 2, "cluster.resize_interval=60")
    planner.begin_generation(planner.wait_for_membership())
    workers.candidates = make_candidates(4, StatePart(1, 0, 1, 7))
    assert planner.poll_regroup() == "pause"
    planner.begin_generation(planner.wait_for_membership())
    workers.candidates = workers.candidates[:3]  # a worker was killed
    planner.begin_generation(planner.wait_for_membership())
    assert planner.poll_regroup() is None
    workers.candidates = make_candidates(4)
    assert planner.poll_regroup() == "pause", "its replacement joins at once"
    planner.begin_generation(planner.wait_for_membership())
    workers.capacity = (NodeCapacity("n0", 2, 0), NodeCapacity("n1", 2, 0, is_draining=True))
    workers.candidates[3] = replace(workers.candidates[3], is_draining=True)
    assert planner.poll_regroup() == "pause", "a draining node is left at once"


def test_devices_go_to_a_run_of_higher_priority_and_come_back_at_once(clock: list[float]) -> None:
    workers = Workers(*make_candidates(4, StatePart(1, 0, 1, 7)))
    workers.capacity = (NodeCapacity("n0", 4, 0),)
    planner, _, lines = make_planner(workers, 4, "cluster.resize_interval=60")
    planner.begin_generation(planner.wait_for_membership())
    workers.capacity, workers.allowance = (NodeCapacity("n0", 2, 0),), Allowance(2, "run other of priority 5")
    assert planner.poll_regroup() == "pause"
    workers.candidates = workers.candidates[:2]  # the others are released
    planner.begin_generation(planner.wait_for_membership())
    assert planner.poll_regroup() is None
    workers.allowance = UNLIMITED
    assert planner.poll_regroup() is None and workers.targets[-1] == 2, "the devices are not free yet"
    workers.capacity = (NodeCapacity("n0", 2, 2),)
    assert planner.poll_regroup() is None and workers.targets[-1] == 4
    workers.candidates = make_candidates(3, StatePart(1, 0, 1, 7))
    assert planner.poll_regroup() is None, "workers that come back come together"
    workers.candidates = make_candidates(4, StatePart(1, 0, 1, 7))
    assert planner.poll_regroup() == "pause", "but do not wait for the interval"
    planner.begin_generation(planner.wait_for_membership())
    assert lines == [
        "resize 4 -> 2 workers: run other of priority 5 has the devices",
        "cluster: room for 4 workers on 1 nodes; 4 wanted, 2 train",
        "resize 2 -> 4 workers: run other of priority 5 has given devices back",
    ]


def test_new_workers_that_do_not_come_are_not_waited_for(clock: list[float]) -> None:
    workers = Workers(*make_candidates(2, StatePart(1, 0, 1, 7)))
    workers.capacity = (NodeCapacity("n0", 2, 0), NodeCapacity("n1", 2, 0))
    planner, _, _ = make_planner(workers, 2)
    planner.begin_generation(planner.wait_for_membership())
    workers.candidates = make_candidates(3, StatePart(1, 0, 1, 7))
    assert planner.poll_regroup() is None
    clock[0] += ARRIVAL_PATIENCE_S
    assert planner.poll_regroup() == "pause"


def test_a_cluster_without_enough_nodes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes come back; before the first generation and after losses, the wait ends with different errors."""
    monkeypatch.setattr(membership_planner, "_CLUSTER_POLL_S", 0.01)
    workers = Workers(*make_candidates(1))
    workers.capacity = (NodeCapacity("n0", 1, 0),)
    planner, stop, _ = make_planner(workers, 2, "cluster.start_timeout=0.05")
    with pytest.raises(ClusterError, match="no slots"):
        planner.wait_for_membership()
    workers.candidates, workers.capacity = make_candidates(2), (NodeCapacity("n0", 2, 0),)
    planner.begin_generation(planner.wait_for_membership())
    workers.candidates, workers.capacity = [], ()
    with pytest.raises(RunFailedError, match="too few workers to continue: no slots"):
        planner.wait_for_membership()

    def return_nodes(count: int, timeout_s: float | None = None) -> None:
        workers.candidates, workers.capacity = make_candidates(2), (NodeCapacity("n1", 2, 0),)

    monkeypatch.setattr(workers, "wait_for_workers", return_nodes)
    assert planner.wait_for_membership().layout.world_size == 2
    workers.candidates, workers.capacity = [], ()
    monkeypatch.setattr(workers, "wait_for_workers", lambda count, timeout_s: stop.set())
    assert planner.wait_for_membership() is None, "a stop ends the wait"


class StartingWorkers(Workers):
    """A worker group of a fixed size, of which the last worker takes its time to start: seconds of a clock of its own.

    `stop` is set `stop_after_s` after the first wait has begun.
    """

    def __init__(self, clock: list[float], start_s: float, stop_after_s: float, *candidates: Candidate):
        super().__init__(*candidates)
        self.clock, self.ready_at, self.stop_at = clock, clock[0] + start_s, clock[0] + stop_after_s
        self.stop = threading.Event()

    def wait_for_workers(self, count: int, timeout_s: float | None = None) -> None:
        self.waits.append(count)
        end = self.clock[0] + (120.0 if timeout_s is None else timeout_s)
        self.clock[0] = min(end, self.ready_at)
        if self.clock[0] >= self.stop_at:
            self.stop.set()
        if self.clock[0] < self.ready_at:
            raise ClusterError("too late")
        self.candidates = make_candidates(count)


@pytest.fixture
def planner_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the planner reads, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(membership_planner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("num_ready", [1, 2], ids=["too few", "fewer than the target"])
def test_a_stop_ends_the_wait_for_a_worker_that_starts(planner_clock: list[float], num_ready: int) -> None:
    workers = StartingWorkers(planner_clock, 100.0, 3.0, *make_candidates(num_ready))
    planner, workers.stop, _ = make_planner(workers, 3)
    assert planner.wait_for_membership() is None
    assert planner_clock[0] - 1000.0 == pytest.approx(3.0, abs=1.0)


def test_a_worker_that_starts_is_waited_for_in_slices(planner_clock: list[float]) -> None:
    workers = StartingWorkers(planner_clock, 100.0, 1e9, *make_candidates(2))
    membership = make_planner(workers, 3)[0].wait_for_membership()
    assert membership.layout.world_size == 3 and planner_clock[0] == pytest.approx(1100.0)
    workers = StartingWorkers(planner_clock, 200.0, 1e9, *make_candidates(2))
    start = planner_clock[0]
    membership = make_planner(workers, 3, "cluster.start_timeout=120")[0].wait_for_membership()
    assert membership.layout.world_size == 2 and planner_clock[0] - start == pytest.approx(120.0)


def test_a_run_that_is_stopping_waits_for_no_more_workers_than_it_needs(planner_clock: list[float]) -> None:
    for num_ready, expected_s in ((2, 0.0), (1, 50.0)):
        start = planner_clock[0]
        workers = StartingWorkers(planner_clock, 50.0, 1e9, *make_candidates(num_ready))
        planner, stop, _ = make_planner(workers, 3)
        stop.set()
        assert planner.wait_for_membership().layout.world_size == 2
        assert planner_clock[0] - start == pytest.approx(expected_s)


def test_a_spare_joins_when_it_is_warm() -> None:
    warm, cold = make_candidates(3, StatePart(1, 0, 1, 7))[:2], replace(make_candidates(3)[2], is_cold=True)
    workers = Workers(*warm, cold)
    planner = make_planner(workers, 3)[0]
    membership = planner.wait_for_membership()
    assert (membership.members, membership.step, workers.waits) == ((0, 1), 7, [])
    planner.begin_generation(membership)
    workers.candidates = [replace(worker, state_parts=()) for worker in workers.candidates]
    assert [planner.poll_regroup() for _ in range(2)] == [None, None]
    workers.candidates[2] = replace(cold, is_cold=False)
    assert planner.poll_regroup() == "pause"
