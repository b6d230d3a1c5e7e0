"""Two steps in memory: the newer replaces the older, and neither changes with the live state."""

from __future__ import annotations

import pytest
import torch

from raytrain_hpc.snapshot.memory_store import Snapshots
from raytrain_hpc.state.host_buffer import Aside
from raytrain_hpc.state.sharded_state import Held, Holding


def test_the_last_two_steps_are_held_whole() -> None:
    live = torch.zeros(3, 4)
    holding = Holding([Held.of("w", live), Held.of("n", torch.tensor(7))])
    snapshots = Snapshots()
    assert snapshots.steps == () and len(snapshots.at(0)) == 0
    for step in range(5):
        live.fill_(float(step))
        snapshots.take(step, holding)
    live.fill_(-1.0)
    assert snapshots.steps == (3, 4)
    for step in (3, 4):
        assert bool((snapshots.at(step).at("w", 0).tensor == step).all())
    assert snapshots.at(4).index() == holding.index() and len(snapshots.at(2)) == 0


def test_what_was_being_copied_is_not_held(monkeypatch) -> None:
    holding = Holding([Held.of("w", torch.ones(2))])
    snapshots = Snapshots()
    snapshots.take(1, holding)
    snapshots.take(2, holding)

    def broken(self, held):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(Aside, "copy", broken)
    with pytest.raises(RuntimeError, match="in the middle"):
        snapshots.take(3, holding)
    assert snapshots.steps == (2,), "the older one is gone, the newer one is whole"
    snapshots.begin(2)
    assert snapshots.steps == () and snapshots.generation == 2


def test_live_state_is_lent_until_it_changes() -> None:
    live = torch.ones(3)
    holding = Holding([Held.of("w", live)])
    snapshots = Snapshots()
    snapshots.lend(4, holding)
    assert snapshots.steps == (), "no copy yet"
    snapshots.withdraw()
    snapshots.keep_lent()
    assert snapshots.steps == (), "it had begun to change"
    snapshots.lend(5, holding)
    snapshots.keep_lent()
    live.fill_(9.0)
    assert snapshots.steps == (5,) and bool((snapshots.at(5).at("w", 0).tensor == 1).all())


def test_copies_of_others_are_offered_beside_the_own_ones() -> None:
    mine, theirs = Held.of("w", torch.ones(2)), Held.of("b", torch.full((3,), 7.0))
    snapshots = Snapshots()
    snapshots.take(3, Holding([mine]))
    slot = snapshots.room_for(1, Holding([theirs]).index())
    assert snapshots.copies == {1: ()}, "nothing has come yet"
    sent = Aside()
    sent.copy([theirs])
    slot.aside.block.copy_(sent.block)
    slot.step = 3
    assert snapshots.copies == {1: (3,)} and snapshots.steps == (3,)
    offered = snapshots.at(3)
    assert [held.name for held in offered] == ["w", "b"] and bool((offered.at("b", 0).tensor == 7).all())


def test_what_replicas_agreed_on_outlives_what_is_distrusted() -> None:
    live = torch.ones(3)
    holding = Holding([Held.of("w", live)])
    snapshots = Snapshots()
    snapshots.agree(3, holding)
    for step in (3, 4, 5):
        live.fill_(float(step))
        snapshots.take(step, holding)
    snapshots.lend(6, holding)
    assert snapshots.steps == (3, 4, 5)
    snapshots.distrust()
    snapshots.keep_lent()
    assert snapshots.steps == (3,) and bool((snapshots.at(3).at("w", 0).tensor == 1).all())
    snapshots.agree(7, holding)
    assert snapshots.steps == (7,)
    snapshots.begin(3)
    assert snapshots.steps == ()


def test_memory_is_kept_from_copy_to_copy_and_follows_the_index() -> None:
    aside = Aside()
    doubles = torch.rand(3, 4, dtype=torch.float64)
    tensors = [torch.arange(5, dtype=torch.int8), doubles, torch.tensor(2.5), torch.empty(0)]
    holding = Holding(Held.of(f"t{number}", tensor) for number, tensor in enumerate(tensors))
    first = aside.copy(holding)
    block = aside.block.data_ptr()
    assert aside.copy(holding) is first and aside.block.data_ptr() == block
    for held in holding:
        assert torch.equal(first.at(held.name, 0).tensor, held.tensor)
    other = aside.copy(list(holding)[:1])
    assert [held.name for held in other] == ["t0"] and aside.block.numel() == 64
