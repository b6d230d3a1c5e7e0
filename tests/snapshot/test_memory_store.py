"""Two steps in memory: the newer replaces the older, and neither changes with the live state."""

from __future__ import annotations

import pytest
import torch

from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.state.host_buffer import HostBuffer
from raytrain_hpc.state.sharded_state import ShardedState, StateShard


def test_the_last_two_steps_are_held_whole() -> None:
    live = torch.zeros(3, 4)
    holding = ShardedState([StateShard.from_tensor("w", live), StateShard.from_tensor("n", torch.tensor(7))])
    snapshots = SnapshotStore()
    assert snapshots.steps == () and len(snapshots.get_state(0)) == 0
    for step in range(5):
        live.fill_(float(step))
        snapshots.take(step, holding)
    live.fill_(-1.0)
    assert snapshots.steps == (3, 4)
    for step in (3, 4):
        assert bool((snapshots.get_state(step).get_shard("w", 0).tensor == step).all())
    assert snapshots.get_state(4).to_index() == holding.to_index() and len(snapshots.get_state(2)) == 0


def test_what_was_being_copied_is_not_held(monkeypatch) -> None:
    holding = ShardedState([StateShard.from_tensor("w", torch.ones(2))])
    snapshots = SnapshotStore()
    snapshots.take(1, holding)
    snapshots.take(2, holding)

    def broken(self, held):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(HostBuffer, "copy", broken)
    with pytest.raises(RuntimeError, match="in the middle"):
        snapshots.take(3, holding)
    assert snapshots.steps == (2,), "the older one is gone, the newer one is whole"
    snapshots.reset(2)
    assert snapshots.steps == () and snapshots.generation == 2


def test_live_state_is_lent_until_it_changes() -> None:
    live = torch.ones(3)
    holding = ShardedState([StateShard.from_tensor("w", live)])
    snapshots = SnapshotStore()
    snapshots.publish_live(4, holding)
    assert snapshots.steps == (), "no copy yet"
    snapshots.revoke_live()
    snapshots.copy_live()
    assert snapshots.steps == (), "it had begun to change"
    snapshots.publish_live(5, holding)
    snapshots.copy_live()
    live.fill_(9.0)
    assert snapshots.steps == (5,) and bool((snapshots.get_state(5).get_shard("w", 0).tensor == 1).all())


def test_copies_of_others_are_offered_beside_the_own_ones() -> None:
    mine, theirs = StateShard.from_tensor("w", torch.ones(2)), StateShard.from_tensor("b", torch.full((3,), 7.0))
    snapshots = SnapshotStore()
    snapshots.take(3, ShardedState([mine]))
    slot = snapshots.reserve_replica(1, ShardedState([theirs]).to_index())
    assert snapshots.replica_steps == {1: ()}, "nothing has come yet"
    sent = HostBuffer()
    sent.copy([theirs])
    slot.buffer.block.copy_(sent.block)
    slot.step = 3
    assert snapshots.replica_steps == {1: (3,)} and snapshots.steps == (3,)
    offered = snapshots.get_state(3)
    assert [held.name for held in offered] == ["w", "b"] and bool((offered.get_shard("b", 0).tensor == 7).all())


def test_what_replicas_agreed_on_outlives_what_is_distrusted() -> None:
    live = torch.ones(3)
    holding = ShardedState([StateShard.from_tensor("w", live)])
    snapshots = SnapshotStore()
    snapshots.keep_verified(3, holding)
    for step in (3, 4, 5):
        live.fill_(float(step))
        snapshots.take(step, holding)
    snapshots.publish_live(6, holding)
    assert snapshots.steps == (3, 4, 5)
    snapshots.discard_unverified()
    snapshots.copy_live()
    assert snapshots.steps == (3,) and bool((snapshots.get_state(3).get_shard("w", 0).tensor == 1).all())
    snapshots.keep_verified(7, holding)
    assert snapshots.steps == (7,)
    snapshots.reset(3)
    assert snapshots.steps == ()


def test_memory_is_kept_from_copy_to_copy_and_follows_the_index() -> None:
    aside = HostBuffer()
    doubles = torch.rand(3, 4, dtype=torch.float64)
    tensors = [torch.arange(5, dtype=torch.int8), doubles, torch.tensor(2.5), torch.empty(0)]
    holding = ShardedState(StateShard.from_tensor(f"t{number}", tensor) for number, tensor in enumerate(tensors))
    first = aside.copy(holding)
    block = aside.block.data_ptr()
    assert aside.copy(holding) is first and aside.block.data_ptr() == block
    for held in holding:
        assert torch.equal(first.get_shard(held.name, 0).tensor, held.tensor)
    other = aside.copy(list(holding)[:1])
    assert [held.name for held in other] == ["t0"] and aside.block.numel() == 64
