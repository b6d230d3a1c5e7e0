"""Model replicas against the coordinates of a layout."""

from __future__ import annotations

import pytest

from raytrain_hpc.elastic.model_replicas import ModelReplicas
from raytrain_hpc.planner.layout import Layout

LAYOUTS = [
    Layout(dp_replicate=3),
    Layout(dp_replicate=2, dp_shard=2, zero=3, tp=2),
    Layout(dp_replicate=2, pp=2, cp=2, tp=2),
    Layout(dp_replicate=4, ep=2),
    Layout(dp_shard=4, zero=3, ep=2, tp=2),
    Layout(dp_replicate=2, cp=2, ep=4),
    Layout(dp_replicate=2, pp=2, ep=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_moving_changes_the_data_parallel_rank_alone(layout: Layout) -> None:
    replicas = ModelReplicas(layout)
    for rank in range(layout.world_size):
        assert replicas.move(rank, 0) == replicas.move(rank, layout.dp_size) == rank
        for shift in range(-1, layout.dp_size):
            moved = replicas.move(rank, shift)
            assert layout.get_dp_rank(moved) == (layout.get_dp_rank(rank) + shift) % layout.dp_size
            own, other = layout.get_coordinates(rank), layout.get_coordinates(moved)
            assert all(own[axis] == other[axis] for axis in ("pp", "cp", "tp"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_every_trace_belongs_to_one_computation(layout: Layout) -> None:
    replicas = ModelReplicas(layout)
    places = [place for dp_rank in range(layout.dp_size) for place in replicas.list_places(dp_rank)]
    num_traces = 1 + (layout.ep if layout.ep > 1 else 0)
    assert sorted(places) == [(rank, number) for rank in range(layout.world_size) for number in range(num_traces)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_places_at_the_same_position_hold_the_same_part_of_the_model(layout: Layout) -> None:
    replicas = ModelReplicas(layout)

    def describe(rank: int, number: int) -> tuple[int, ...]:
        coordinates = layout.get_coordinates(rank)
        part = (coordinates["pp"], coordinates["tp"])
        return (*part, coordinates["cp"]) if number == 0 else (*part, layout.get_expert_coordinates(rank)["ep"])

    parts = {tuple(describe(*place) for place in replicas.list_places(dp_rank)) for dp_rank in range(layout.dp_size)}
    assert len(parts) == 1


def test_peers_of_an_expert_are_in_the_order_of_their_coordinates() -> None:
    layout = Layout(dp_replicate=4, tp=2, ep=2)
    replicas = ModelReplicas(layout)
    for rank in range(layout.world_size):
        peers = replicas.get_expert_peers(rank)
        assert [layout.get_expert_coordinates(peer)["ep"] for peer in peers] == [0, 1] and rank in peers
    assert ModelReplicas(Layout(dp_replicate=2)).get_expert_peers(1) == [1]
