"""Holders of shards against the coordinates of a layout and its reduction orders."""

from __future__ import annotations

import pytest

from raytrain_hpc.elastic.shard_holders import ShardHolders, choose_shift
from raytrain_hpc.parallel.reduction_order import make_reduction_orders
from raytrain_hpc.planner.layout import Batching, Layout
from tests.elastic.test_model_replicas import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_every_place_belongs_to_one_rank(layout: Layout) -> None:
    holders = ShardHolders(layout)
    for kind in holders.kinds:
        places = [holders.get_place(kind, rank) for rank in range(layout.world_size)]
        assert len(set(places)) == layout.world_size
        assert {place.shard for place in places} == set(range(holders.count_shards(kind)))
        assert {place.copy for place in places} == set(range(holders.count_copies(kind)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_places_are_those_of_the_reduction(layout: Layout) -> None:
    """The slice of a sum that a rank computes is numbered by its copy, and its shard by the reduce-scatter."""
    holders = ShardHolders(layout)
    for rank in range(layout.world_size):
        orders = make_reduction_orders(layout, Batching(8, 1), rank)
        for kind in holders.kinds:
            order = orders.dense if kind == "dense" else orders.experts
            assert order is not None
            place = holders.get_place(kind, rank)
            assert (place.shard, place.copy) == (order.shards.rank, order.replicas.rank)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_moving_changes_the_shard_alone(layout: Layout) -> None:
    holders = ShardHolders(layout)
    for kind in holders.kinds:
        for rank in range(layout.world_size):
            for shift in (0, 1, -1):
                own, moved = (holders.get_place(kind, r) for r in (rank, holders.move(kind, rank, shift)))
                assert (moved.group, moved.copy) == (own.group, own.copy)
                assert (moved.shard - own.shard - shift) % holders.count_shards(kind) == 0


def test_consecutive_numbers_meet_every_other_rank() -> None:
    assert [choose_shift(draw, 1) for draw in range(3)] == [0, 0, 0]
    assert [choose_shift(draw, 4) for draw in range(5)] == [1, 2, 3, 1, 2]
