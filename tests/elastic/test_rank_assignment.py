"""Who keeps its place: as much as a search over all exchanges finds, and nobody nearer or further from anybody."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from raytrain_hpc.elastic.rank_assignment import assign_ranks
from raytrain_hpc.elastic.state_partition import compute_state_partition
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.placement import Site, compute_crossing_bytes, place_ranks

SENT = {"tp": 100.0, "pp": 3.0, "dp_shard": 10.0}


def kept(placed: tuple[int, ...], held: list[list[int]], needed: list[int]) -> int:
    """Ranks whose worker holds what they need."""
    return sum(needed[rank] in held[worker] for rank, worker in enumerate(placed))


def test_a_node_that_comes_takes_the_place_of_the_one_that_went() -> None:
    layout = Layout(tp=2, pp=2, dp_shard=2, zero=1)
    needed = compute_state_partition(layout)
    sites = [Site("", f"node-{1 + worker // 2}") for worker in range(8)]  # node-0 is gone, node-4 has come
    held = [[needed[2 + worker], needed[worker]] if worker < 6 else [] for worker in range(8)]  # and copies
    placed = assign_ranks(place_ranks(layout, sites, SENT), sites, held, needed)
    assert placed == (6, 7, 0, 1, 2, 3, 4, 5)


def test_a_worker_that_comes_takes_the_place_of_the_one_that_went() -> None:
    layout = Layout(dp_shard=4, zero=3)
    held: list[list[int]] = [[0], [2], [3, 1], []]
    assert assign_ranks((0, 1, 2, 3), [Site("", "one")] * 4, held, compute_state_partition(layout)) == (0, 3, 1, 2)


@pytest.mark.parametrize("seed", range(60))
def test_as_many_stay_as_in_the_best_of_all_exchanges(seed: int) -> None:
    draw = random.Random(seed)
    a_node, nodes, racks = draw.choice([1, 2]), draw.choice([2, 3, 4]), draw.choice([1, 2])
    layout = Layout(tp=a_node, dp_shard=nodes, zero=1)
    needed, world = compute_state_partition(layout), a_node * nodes
    sites = [Site(f"rack-{worker // a_node % racks}", f"node-{worker // a_node}") for worker in range(world)]
    lost = draw.sample(range(world), draw.randrange(world))
    shuffled = [needed[rank] for rank in draw.sample(range(world), world)]
    held = [[] if worker in lost else [shuffled[worker]] for worker in range(world)]
    before = place_ranks(layout, sites, SENT)
    placed = assign_ranks(before, sites, held, needed)
    assert sorted(placed) == list(range(world))
    assert compute_crossing_bytes(layout, [sites[w] for w in placed], SENT) == compute_crossing_bytes(
        layout, [sites[w] for w in before], SENT
    )
    if a_node == 1:  # where nodes are single workers, a search can try all that may be exchanged
        legal = (
            other
            for other in permutations(range(world))
            if [sites[worker].rack for worker in other] == [sites[worker].rack for worker in before]
        )
        assert kept(placed, held, needed) == max(kept(other, held, needed) for other in legal)


def test_what_everybody_has_moves_nobody() -> None:
    sites = [Site("", f"node-{worker}") for worker in range(3)]
    assert assign_ranks((2, 0, 1), sites, [[0]] * 3, [0, 0, 0]) == (2, 0, 1)
