"""Spares whose processes end while they are idle, on a fake Ray: they are noticed, replaced, and given no rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver import spare_health, vacant_slots, worker_group
from raytrain_hpc.driver.ray_backend import RayWorkerGroup
from raytrain_hpc.driver.spare_health import SpareHealth
from raytrain_hpc.driver.worker_group import ActorPool
from raytrain_hpc.planner.topology import Node, Topology
from tests.driver.dry_run import FakeRendezvousStore
from tests.driver.fake_ray import FakeRay, FakeRef, Scenario

CLUSTER = Topology((Node("n0", "10.0.0.1", 4),), "cuda", "h100")


class DyingSpares(FakeRay):
    """A fake Ray whose actors hold calls until they are told to return them, or die."""

    def __init__(self) -> None:
        super().__init__(CLUSTER, Scenario())
        self.held: dict[int, list[FakeRef]] = {}  # by pid

    def call(self, target: Any, name: str, arguments: tuple[Any, ...]) -> FakeRef:
        if name != "hold":
            return super().call(target, name, arguments)
        self.held.setdefault(target.pid, []).append(FakeRef())
        return self.held[target.pid][-1]

    def die(self, worker: Any) -> None:
        self.held[worker.info["pid"]][-1].resolve(error=ActorDiedError())


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[DyingSpares]:
    monkeypatch.setattr(worker_group, "_REPLACEMENT_DELAY_S", 0.0)
    monkeypatch.setattr(vacant_slots, "_FIRST_DELAY_S", 0.0)
    with DyingSpares() as fake_ray:
        yield fake_ray


@pytest.fixture
def workers(fake_ray: DyingSpares) -> Iterator[RayWorkerGroup]:
    """Four workers, of which the first two are the ranks."""
    config = load_config(None, ["cluster.workers=2", "cluster.spares=2", "cluster.start_timeout=5"])
    pool = ActorPool(config, 4, CLUSTER, fake_ray.workers)
    workers = RayWorkerGroup(config, pool, FakeRendezvousStore(), ray_readers=False)  # type: ignore[arg-type]
    workers.start()
    workers.set_members((0, 1))
    yield workers
    workers.close()


def list_ids(workers: RayWorkerGroup) -> list[int]:
    workers.get_capacity()  # as the planner does before it looks at the candidates
    return [candidate.worker_id for candidate in workers.list_candidates()]


def test_a_dead_spare_is_replaced_while_ranks_train(fake_ray: DyingSpares, workers: RayWorkerGroup) -> None:
    for _ in range(3):
        assert list_ids(workers) == [0, 1, 2, 3]
    assert {pid: len(calls) for pid, calls in fake_ray.held.items()} == {1003: 1, 1004: 1}, "one call per spare"
    fake_ray.die(workers._pool.ready[2])
    assert list_ids(workers) == [0, 1, 3, 4]


def test_a_spare_that_died_just_before_a_rank_gets_no_rank(fake_ray: DyingSpares, workers: RayWorkerGroup) -> None:
    list_ids(workers)
    fake_ray.die(workers._pool.ready[2])
    workers._pool.replace_worker(workers._workers[1])  # that rank was killed, which ended the generation
    assert list_ids(workers)[:2] == [0, 3]
    workers.wait_for_workers(4)
    assert list_ids(workers) == [0, 3, 4, 5]


def test_members_are_not_replaced_as_spares(fake_ray: DyingSpares, workers: RayWorkerGroup) -> None:
    list_ids(workers)
    workers.set_members((0, 2))
    fake_ray.die(workers._pool.ready[2])  # in its first moments as a rank, whose run call fails then
    assert list_ids(workers) == [0, 1, 2, 3]


def test_spares_that_die_one_after_the_other_are_replaced_later_and_later(
    fake_ray: DyingSpares, workers: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, starts = [1000.0], list[float]()
    monkeypatch.setattr(vacant_slots, "_FIRST_DELAY_S", 0.5)
    for module in (vacant_slots, worker_group):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    newest = 3
    while len(starts) < 9:
        ids = list_ids(workers)
        if ids[-1] > newest:
            newest = ids[-1]
            starts.append(now[0])
        if len(ids) == 4:
            list_ids(workers)
            fake_ray.die(workers._pool.ready[3])
        now[0] += 0.25
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert gaps == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0], abs=0.6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(spare_health, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


class Spare:
    """A spare whose calls return on command."""

    def __init__(self) -> None:
        self.calls: list[FakeRef] = []
        self.actor = SimpleNamespace(hold=SimpleNamespace(remote=self._hold))

    def _hold(self, seconds: float) -> FakeRef:
        self.calls.append(FakeRef())
        return self.calls[-1]


@pytest.mark.usefixtures("fake_ray")
def test_a_spare_that_does_not_answer_is_a_last_resort_and_is_replaced_in_the_end(clock: list[float]) -> None:
    health, spare = SpareHealth[Spare](), Spare()
    assert health.update([spare]) == {} and not health.is_silent(spare)
    spare.calls[0].resolve()
    clock[0] += 100.0  # of another recovery: nobody has looked for the answer
    assert health.update([spare]) == {} and not health.is_silent(spare) and len(spare.calls) == 2
    clock[0] += 11.0
    assert health.update([spare]) == {} and not health.is_silent(spare)
    clock[0] += 2.0
    assert health.update([spare]) == {} and health.is_silent(spare)
    spare.calls[1].resolve()
    assert health.update([spare]) == {} and not health.is_silent(spare), "its interpreter was held"
    clock[0] += 303.0
    assert health.update([spare]) == {spare: "it has not answered for 301 s"}


@pytest.mark.usefixtures("fake_ray")
def test_calls_are_two_seconds_apart_and_members_are_forgotten(clock: list[float]) -> None:
    health, spare = SpareHealth[Spare](), Spare()
    for _ in range(400):  # of five seconds
        health.update([spare])
        if not spare.calls[-1].ready:
            spare.calls[-1].resolve(error=ActorUnavailableError("", None) if len(spare.calls) == 2 else None)
        clock[0] += 0.0125
    assert len(spare.calls) == 3
    clock[0] += 2.0
    health.update([spare])
    health.update([])  # it is a rank now, whose death is a failure of the run
    spare.calls[-1].resolve(error=ActorDiedError())
    assert len(spare.calls) == 4 and health.update([spare]) == {} and len(spare.calls) == 5
