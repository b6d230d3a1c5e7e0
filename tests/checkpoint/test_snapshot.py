"""Two steps in memory: the newer replaces the older, and neither changes with the live state."""

from __future__ import annotations

import pytest
import torch

from raytrain_hpc.checkpoint.snapshot import Snapshots
from raytrain_hpc.state.holding import Held, Holding


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

    def broken(held):
        raise RuntimeError("in the middle")

    for slot in snapshots._slots:
        monkeypatch.setattr(slot.aside, "copy", broken)
    with pytest.raises(RuntimeError, match="in the middle"):
        snapshots.take(3, holding)
    assert snapshots.steps == (2,), "the older one is gone, the newer one is whole"
    snapshots.drop()
    assert snapshots.steps == ()
