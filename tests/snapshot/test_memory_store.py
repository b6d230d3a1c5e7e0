"""In-memory snapshots: the newest replaces the oldest of two, and none changes with the live state."""

from __future__ import annotations

import pytest
import torch

from raytrain_hpc.snapshot.memory_store import NUM_SLOTS, SnapshotRing, SnapshotSlot, SnapshotStore
from raytrain_hpc.state.host_buffer import HostBuffer
from raytrain_hpc.state.sharded_state import ShardedState, StateShard


def test_the_last_two_snapshots_are_kept() -> None:
    live = torch.zeros(3, 4)
    state = ShardedState([StateShard.from_tensor("w", live), StateShard.from_tensor("n", torch.tensor(7))])
    snapshots = SnapshotStore()
    assert snapshots.steps == () and len(snapshots.get_state(0)) == 0
    for step in range(5):
        live.fill_(float(step))
        snapshots.take(step, state)
    live.fill_(-1.0)
    assert snapshots.steps == (3, 4)
    for step in (3, 4):
        assert bool((snapshots.get_state(step).get_shard("w", 0).tensor == step).all())
    assert snapshots.get_state(4).to_index() == state.to_index() and len(snapshots.get_state(2)) == 0


def test_an_interrupted_copy_is_not_a_snapshot(monkeypatch) -> None:
    state = ShardedState([StateShard.from_tensor("w", torch.ones(2))])
    snapshots = SnapshotStore()
    snapshots.take(1, state)
    snapshots.take(2, state)

    def fail(self, shards):
        raise RuntimeError("copy interrupted")

    monkeypatch.setattr(HostBuffer, "copy", fail)
    with pytest.raises(RuntimeError, match="copy interrupted"):
        snapshots.take(3, state)
    assert snapshots.steps == (2,), "the older snapshot is invalid, the newer one complete"
    snapshots.reset(2)
    assert snapshots.steps == () and snapshots.generation == 2


def test_the_live_state_is_copied_unless_it_was_revoked() -> None:
    live = torch.ones(3)
    state = ShardedState([StateShard.from_tensor("w", live)])
    snapshots = SnapshotStore()
    snapshots.publish_live(4, state)
    assert snapshots.steps == (), "not copied yet"
    snapshots.revoke_live()
    snapshots.copy_live()
    assert snapshots.steps == (), "the state may have changed"
    snapshots.publish_live(5, state)
    snapshots.copy_live()
    live.fill_(9.0)
    assert snapshots.steps == (5,) and bool((snapshots.get_state(5).get_shard("w", 0).tensor == 1).all())


def test_replicas_are_returned_after_the_own_snapshot() -> None:
    own, peer = StateShard.from_tensor("w", torch.ones(2)), StateShard.from_tensor("b", torch.full((3,), 7.0))
    snapshots = SnapshotStore()
    snapshots.take(3, ShardedState([own]))
    slot = snapshots.reserve_replica(1, ShardedState([peer]).to_index())
    assert snapshots.replica_steps == {1: ()}, "nothing has been received yet"
    send_buffer = HostBuffer()
    send_buffer.copy([peer])
    slot.buffer.block.copy_(send_buffer.block)
    slot.step = 3
    assert snapshots.replica_steps == {1: (3,)} and snapshots.steps == (3,)
    state = snapshots.get_state(3)
    assert [shard.name for shard in state] == ["w", "b"] and bool((state.get_shard("b", 0).tensor == 7).all())


def test_the_verified_state_survives_discarding_unverified_snapshots() -> None:
    live = torch.ones(3)
    state = ShardedState([StateShard.from_tensor("w", live)])
    snapshots = SnapshotStore()
    snapshots.keep_verified(3, state)
    for step in (3, 4, 5):
        live.fill_(float(step))
        snapshots.take(step, state)
    snapshots.publish_live(6, state)
    assert snapshots.steps == (3, 4, 5)
    snapshots.discard_unverified()
    snapshots.copy_live()
    assert snapshots.steps == (3,) and bool((snapshots.get_state(3).get_shard("w", 0).tensor == 1).all())
    snapshots.keep_verified(7, state)
    assert snapshots.steps == (7,)
    snapshots.reset(3)
    assert snapshots.steps == ()


def test_a_verified_snapshot_is_kept_beside_the_last_two() -> None:
    live = torch.ones(1000)
    state = ShardedState([StateShard.from_tensor("w", live)])
    slots = [SnapshotSlot() for _ in range(NUM_SLOTS)]
    ring, snapshots = SnapshotRing(slots), SnapshotStore()
    snapshots.reset(1, ring)
    kept: list[tuple[int, ...]] = []
    for step in range(1, 9):
        live.fill_(float(step))
        snapshots.take(step, state)
        if step == 2:
            assert sum(slot.buffer.block.numel() > 0 for slot in slots) == 2, "memory is taken when it is needed"
        if step in (3, 4, 6):
            snapshots.keep_verified_snapshots(step)
        kept.append(snapshots.steps)
    assert kept == [(1,), (1, 2), (2, 3), (2, 3, 4), (3, 4, 5), (4, 5, 6), (5, 6, 7), (6, 7, 8)]
    assert bool((snapshots.get_state(6).get_shard("w", 0).tensor == 6).all())
    snapshots.discard_unverified()
    assert snapshots.steps == (6,)
    snapshots.reset(2)
    assert snapshots.steps == ()


def test_a_host_buffer_is_reused_and_follows_the_index() -> None:
    buffer = HostBuffer()
    doubles = torch.rand(3, 4, dtype=torch.float64)
    tensors = [torch.arange(5, dtype=torch.int8), doubles, torch.tensor(2.5), torch.empty(0)]
    state = ShardedState(StateShard.from_tensor(f"t{number}", tensor) for number, tensor in enumerate(tensors))
    copies = buffer.copy(state)
    address = buffer.block.data_ptr()
    assert buffer.copy(state) is copies and buffer.block.data_ptr() == address
    for shard in state:
        assert torch.equal(copies.get_shard(shard.name, 0).tensor, shard.tensor)
    smaller = buffer.copy(list(state)[:1])
    assert [shard.name for shard in smaller] == ["t0"] and buffer.block.numel() == 64
