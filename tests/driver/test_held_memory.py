"""Shared memory that a node's agent holds: until the next generation has its own, and only what it can restore."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import pytest
import torch

from raytrain_hpc.driver.held_memory import HeldMemory
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.heartbeat import Heartbeat, HeartbeatReader
from raytrain_hpc.runtime.published_memory import PublishedMemory
from raytrain_hpc.snapshot.journal import SharedJournal
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.snapshot.shared_memory import AttachedSnapshots, SharedSnapshots
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
from raytrain_hpc.training.snapshot_peers import SnapshotPeers
from tests.warm_pool import make_small_config, make_worker_spec


def make_state(value: int) -> ShardedState:
    return ShardedState([StateShard.from_tensor("w", torch.full((5,), float(value)))])


class Rank:
    """Snapshots of a rank, as its process has them."""

    def __init__(self, generation: int, rank: int):
        self.generation, self.rank, self.store = generation, rank, SnapshotStore()
        self.snapshots = SharedSnapshots(make_state(0).to_index())
        self.journal = SharedJournal() if rank == 0 else None
        self.store.reset(generation, self.snapshots)

    def take(self, step: int) -> None:
        self.store.take(step, make_state(10 * step + self.rank))
        if self.journal is not None:
            self.journal.append({"step": step, "loss": float(step)})

    def publish(self) -> PublishedMemory:
        metrics = None if self.journal is None else self.journal.handle
        return PublishedMemory(self.generation, {self.rank: self.snapshots.handles}, metrics)


def list_steps(held: HeldMemory) -> dict[tuple[int, int], tuple[int, ...]]:
    steps: dict[tuple[int, int], tuple[int, ...]] = {}
    for snapshot in held.list_snapshots():
        key = snapshot.generation, snapshot.rank
        steps[key] = (*steps.get(key, ()), snapshot.step)
    return steps


def test_snapshots_outlive_their_ranks_until_the_next_generation_has_two() -> None:
    held, first = HeldMemory(), [Rank(1, 0), Rank(1, 1)]
    for rank in first:
        for step in (4, 5):
            rank.take(step)
    held.update({100 + rank.rank: rank.publish() for rank in first})
    del first, rank
    assert list_steps(held) == {(1, 0): (4, 5), (1, 1): (4, 5)}
    handles = {(snapshot.rank, snapshot.step): snapshot.handles for snapshot in held.list_snapshots()}
    assert held.recall_metrics(4) == [(1, {"step": 5, "loss": 5.0})]
    held.keep_step(5)
    state = AttachedSnapshots(handles[1, 5]).get_state(5)
    assert torch.equal(state.get_shard("w", 0).tensor, torch.full((5,), 51.0))
    assert list_steps(held) == {(1, 0): (5,), (1, 1): (5,)}, "the other snapshots only take memory"
    second = [Rank(2, 0), Rank(2, 1)]
    for rank in second:
        rank.take(5)
    held.update({200: second[0].publish(), 201: PublishedMemory(0)})
    assert (1, 0) in list_steps(held), "one worker has not restored its state yet"
    held.update({200 + rank.rank: rank.publish() for rank in second})
    second[0].take(6)
    held.update({200 + rank.rank: rank.publish() for rank in second})
    assert (1, 0) in list_steps(held)
    second[1].take(6)
    held.update({200 + rank.rank: rank.publish() for rank in second})
    assert list_steps(held) == {(2, 0): (5, 6), (2, 1): (5, 6)}
    assert [(generation, metrics["step"]) for generation, metrics in held.recall_metrics(0)] == [(2, 5), (2, 6)]


def test_a_generation_without_partitioned_state_releases_everything() -> None:
    held, rank = HeldMemory(), Rank(1, 0)
    rank.take(3)
    held.update({1: rank.publish()})
    assert list_steps(held)
    held.update({1: PublishedMemory(2)})
    assert not list_steps(held) and held.recall_metrics(0) == []


def test_a_generation_that_starts_from_a_checkpoint_releases_everything() -> None:
    held, rank = HeldMemory(), Rank(1, 0)
    rank.take(3)
    held.update({1: rank.publish()})
    held.clear()
    held.update({1: rank.publish()})
    assert not list_steps(held), "what was released is not opened again"


def test_memory_that_cannot_be_opened_releases_none_of_the_generation_before() -> None:
    held, first, second = HeldMemory(), Rank(1, 0), Rank(2, 0)
    first.take(3)
    held.update({1: first.publish()})
    memory = second.publish()
    del second
    for _ in range(2):
        held.update({1: memory})
    assert list_steps(held) == {(1, 0): (3,)}


@pytest.mark.parametrize("is_partitioned", [True, False])
def test_workers_publish_in_every_generation(is_partitioned: bool) -> None:
    """Without snapshots in shared memory too, so that agents release those of the generation before."""
    words = ["parallel.zero=3"] if is_partitioned else []
    spec = replace(
        make_worker_spec(make_small_config(None, *words), 2, steps_to=3),
        replication_pairs=((0, 1), (1, 0)) if is_partitioned else (),
        max_ranks_per_node=2,
    )
    heartbeat = Heartbeat()
    index = make_state(0).to_index()
    peers = SnapshotPeers(spec, 0, SnapshotStore(), torch.device("cpu"), index)
    peers.publish(ControlChannel(heartbeat=heartbeat))
    memory = HeartbeatReader(os.getpid(), heartbeat.path).read_memory()
    assert memory.generation == spec.generation and list(memory.snapshots) == ([0] if is_partitioned else [])
    assert (memory.metrics is not None) == is_partitioned


def test_a_worker_publishes_through_its_heartbeat() -> None:
    heartbeat = Heartbeat()
    reader = HeartbeatReader(os.getpid(), heartbeat.path)
    assert reader.read_memory() == PublishedMemory(0)
    for generation in (1, 2, 3):  # the descriptors of the files alternate
        memory = Rank(generation, 0).publish()
        heartbeat.publish_memory(memory)
        if generation != 2:
            assert reader.read_memory() == memory
    assert reader.read_memory() == memory


def count_shared_files() -> int:
    """Return the number of open descriptors of shared memory. Of other files, the garbage collector closes some."""
    links = [entry.path for entry in os.scandir("/proc/self/fd")]
    return sum("memfd:raytrain-shared" in os.readlink(link) for link in links if os.path.islink(link))


def test_no_descriptor_stays_open() -> None:
    gc.collect()
    before, held = count_shared_files(), HeldMemory()
    for generation in (1, 2, 3):
        rank = Rank(generation, 0)
        rank.take(1)
        rank.take(2)
        held.update({1: rank.publish()})
        del rank
        assert count_shared_files() > before
    held.clear()
    assert count_shared_files() == before
