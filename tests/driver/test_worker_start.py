"""Start of workers on a fake Ray: replacements that fail to start are started again while others wait for them."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import ActorDiedError

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver import node_drain, slot_reservations, vacant_slots, worker_group
from raytrain_hpc.driver.health_monitor import HealthMonitor
from raytrain_hpc.driver.ray_backend import RayWorkerGroup
from raytrain_hpc.driver.worker_group import ActorPool
from raytrain_hpc.elastic.cluster_following import NodeCapacity
from raytrain_hpc.errors import ClusterError, WorkerFailedError
from raytrain_hpc.planner.topology import Node, Topology
from tests.driver.dry_run import FakeRendezvousStore
from tests.driver.fake_ray import FakeRay, FakeRef, Scenario

CLUSTER = Topology((Node("n0", "10.0.0.1", 2),), "cuda", "h100")


class FailingStarts(FakeRay):
    """A fake Ray on which the next `failing` actors do not start."""

    failing = 0

    def call(self, target: Any, name: str, arguments: tuple[Any, ...]) -> FakeRef:
        if name == "describe" and self.failing:
            self.failing -= 1
            return FakeRef().resolve(error=ActorDiedError())
        return super().call(target, name, arguments)


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays of a millisecond and more before a start in a slot in which one has failed."""
    monkeypatch.setattr(vacant_slots, "_FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(worker_group, "_REFILL_INTERVAL_S", 0.001)


@pytest.mark.usefixtures("short_delays")
@pytest.mark.parametrize(("failing", "recovers"), [(0, True), (1, True), (5, True), (6, False)])
def test_failed_start_of_the_only_replacement_is_repeated(failing: int, recovers: bool) -> None:
    with FailingStarts(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(None, ["cluster.start_timeout=20"]), 2, CLUSTER, fake_ray.workers)
        pool.start()
        pool.replace_worker(pool.ready[0])
        fake_ray.failing = failing
        if recovers:
            pool.wait_for_workers(2)
            assert [worker.worker_id for worker in pool.ready] == [1, 2 + failing]
        else:
            with pytest.raises(ClusterError, match="only 1 of 2 workers"):
                pool.wait_for_workers(2)


@pytest.mark.usefixtures("short_delays")
def test_starts_that_fail_together_once_are_all_repeated() -> None:
    """As when the server of their files does not answer for a moment."""
    cluster = Topology((Node("n0", "10.0.0.1", 9),), "cuda", "h100")
    with FailingStarts(cluster, Scenario()) as fake_ray:
        pool = ActorPool(load_config(None, ["cluster.start_timeout=20"]), 9, cluster, fake_ray.workers)
        pool.start()
        for worker in pool.ready[1:]:
            pool.replace_worker(worker)
        fake_ray.failing = 8
        pool.wait_for_workers(9)
        assert fake_ray.failing == 0 and len({worker.slot for worker in pool.ready}) == 9


def test_a_slot_is_tried_later_and_later_but_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in (vacant_slots, worker_group):
        monkeypatch.setattr(module, "time", clock)
    with FailingStarts(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(), 2, CLUSTER, fake_ray.workers)
        pool.start()
        pool.replace_worker(pool.ready[0])
        fake_ray.failing, starts = 12, list[float]()
        while len(pool.ready) < 2 and now[0] < 2000.0:
            before = fake_ray.failing
            pool.poll_started()
            starts += [now[0]] * (before - fake_ray.failing)
            now[0] += 0.25
        gaps = [later - earlier for earlier, later in pairwise(starts)]
        assert gaps[:7] == pytest.approx([1.5, 2.0, 3.0, 5.0, 9.0, 17.0, 33.0], abs=0.3), "a second is the usual delay"
        assert gaps[7:] == pytest.approx([61.0] * 4, abs=0.3) and len(pool.ready) == 2


def test_a_slot_on_a_draining_node_is_filled_when_it_has_moved() -> None:
    with FakeRay(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(None, ["cluster.start_timeout=0.5"]), 2, CLUSTER, fake_ray.workers)
        pool.start()
        draining = frozenset({"n0"})
        with mock.patch.object(node_drain, "get_draining_nodes", lambda: draining):
            pool.drain_monitor = node_drain.NodeDrainMonitor()
            pool.leave_node("n0")
            with pytest.raises(ClusterError, match="only 0 of 1 workers"):
                pool.wait_for_workers(1)
        pool.drain_monitor = node_drain.NodeDrainMonitor()
        pool.wait_for_workers(2)


def test_slots_of_a_followed_cluster_belong_to_their_nodes() -> None:
    nodes = [NodeCapacity("n0", 0, 2), NodeCapacity("n1", 0, 1)]
    with FakeRay(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(), 3, CLUSTER, fake_ray.workers, nodes=nodes)
        pool.start()
        pool.wait_for_workers(3)
        assert pool.count_slots_by_node() == {"n0": 2, "n1": 1}
        pool.leave_node("n0")
        assert pool.count_slots_by_node() == {"n1": 1} and len(pool.ready) == 1
        with pytest.raises(ClusterError, match="only 1 of 2 workers"):
            pool.wait_for_workers(2)
        pool.scale_up_to(2, [NodeCapacity("n1", 1, 0), NodeCapacity("n2", 0, 4)])
        pool.wait_for_workers(2)
        assert pool.count_slots_by_node() == {"n1": 1, "n2": 1}


def test_slots_beyond_an_allowance_are_released_node_by_node() -> None:
    nodes = [NodeCapacity("n0", 0, 2), NodeCapacity("n1", 0, 2), NodeCapacity("n2", 0, 1)]
    with FakeRay(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(), 5, CLUSTER, fake_ray.workers, nodes=nodes)
        pool.start()
        pool.wait_for_workers(4)
        members = [worker for worker in pool.ready if worker.slot.node_id == "n1"]
        pool.release_surplus(5, members)
        assert pool.count_slots() == 5
        pool.release_surplus(3, members)
        assert pool.count_slots_by_node() == {"n1": 2, "n2": 1}
        pool.release_surplus(1, members)
        assert pool.count_slots_by_node() == {"n1": 2} and pool.ready == members, "members keep their slots"


def test_a_worker_of_a_followed_cluster_is_started_again_if_its_first_start_fails() -> None:
    with FailingStarts(CLUSTER, Scenario()) as fake_ray:
        fake_ray.failing = 1
        pool = ActorPool(load_config(), 2, CLUSTER, fake_ray.workers, nodes=[NodeCapacity("n0", 0, 2)])
        pool.start()
        pool.wait_for_workers(2)
        assert len(pool.ready) == 2


def test_all_workers_leave_with_the_driver() -> None:
    with FakeRay(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(), 2, CLUSTER, fake_ray.workers)
        workers = RayWorkerGroup(load_config(), pool, FakeRendezvousStore(), ray_readers=False)
        workers.start()
        assert [candidate.is_draining for candidate in workers.list_candidates()] == [False, False]
        pool.drain_monitor.avoid({"driver"})  # the network of a rank beside it is down
        assert [candidate.is_draining for candidate in workers.list_candidates()] == [False, False]
        pool.drain_monitor.announce({"driver"})
        assert [candidate.is_draining for candidate in workers.list_candidates()] == [True, True]
        workers.close()


def test_workers_leave_a_node_that_the_run_avoids() -> None:
    with FakeRay(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(), 2, CLUSTER, fake_ray.workers)
        workers = RayWorkerGroup(load_config(), pool, FakeRendezvousStore(), ray_readers=False)
        workers.start()
        pool.drain_monitor.avoid({"n0"})
        assert {candidate.node_id: candidate.is_draining for candidate in workers.list_candidates()} == {"n0": True}
        workers.close()


def test_failed_first_start_ends_the_run() -> None:
    with FailingStarts(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(), 2, CLUSTER, fake_ray.workers)
        fake_ray.failing = 1
        with pytest.raises(ClusterError, match="a worker did not start"):
            pool.start()


def test_a_spare_alone_on_a_node_that_is_lost_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says for seconds that the node is alive."""
    cluster = Topology((Node("n0", "10.0.0.1", 1), Node("n1", "10.0.0.2", 1)), "cuda", "h100")
    with FakeRay(cluster, Scenario()) as fake_ray:
        pool = ActorPool(load_config(), 2, cluster, fake_ray.workers)
        workers = RayWorkerGroup(load_config(), pool, FakeRendezvousStore(), ray_readers=False)
        workers.start()
        assert [candidate.node_id for candidate in workers.list_candidates()] == ["n0", "n1"]
        (member,) = workers.set_members((0,))
        place = {key: member[key] for key in ("node", "pid", "node_id")}
        failure = WorkerFailedError(0, kind="died", reason="killed", detected_at=0.0, last_seen=0.0, **place)
        monkeypatch.setattr(HealthMonitor, "find_lost_nodes", lambda self, rank_failed: ["n1"] if rank_failed else [])
        assert workers._abort_generation(0.0, [failure]) is failure
        assert workers.list_candidates() == []
        workers.close()


class NeverStarting(FakeRay):
    """A fake Ray on which no actor becomes ready."""

    def call(self, target: Any, name: str, arguments: tuple[Any, ...]) -> FakeRef:
        return FakeRef() if name == "describe" else super().call(target, name, arguments)


def test_a_stop_ends_the_wait_for_slots_and_for_the_first_workers() -> None:
    config, stop_event = load_config(None, ["cluster.start_timeout=120"]), threading.Event()
    with NeverStarting(CLUSTER, Scenario()) as fake_ray:
        pool, start = ActorPool(config, 2, CLUSTER, fake_ray.workers, stop_event=stop_event), time.monotonic()
        threading.Timer(0.2, stop_event.set).start()
        pool.start()
        assert pool.ready == [] and time.monotonic() - start < 60
        taken = SimpleNamespace(wait=lambda timeout_s: time.sleep(min(timeout_s, 0.01)))
        with (
            mock.patch.object(slot_reservations, "placement_group", lambda bundles, **named: taken),
            pytest.raises(ClusterError, match="stopped before 2 free GPU slots were available"),
        ):
            ActorPool(config, 2, CLUSTER, fake_ray.workers, stop_event=stop_event)
