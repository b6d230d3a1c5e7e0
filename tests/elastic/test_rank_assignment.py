"""Rank assignment keeps as many workers in place as a search over all exchanges, at the same communication cost."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from raytrain_hpc.elastic.rank_assignment import assign_ranks
from raytrain_hpc.elastic.state_partition import compute_state_partition
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.placement import Site, compute_crossing_bytes, place_ranks

BYTES_BY_AXIS = {"tp": 100.0, "pp": 3.0, "dp_shard": 10.0}


def count_kept(placement: tuple[int, ...], held_parts: list[list[int]], needed_parts: list[int]) -> int:
    """Count the ranks whose worker holds the state part they need."""
    return sum(needed_parts[rank] in held_parts[worker] for rank, worker in enumerate(placement))


def test_a_new_node_takes_the_ranks_of_the_lost_node() -> None:
    layout = Layout(tp=2, pp=2, dp_shard=2, zero=1)
    needed_parts = compute_state_partition(layout)
    sites = [Site("", f"node-{1 + worker // 2}") for worker in range(8)]  # node-0 is lost, node-4 is new
    # own part, then a replica
    held_parts = [[needed_parts[2 + worker], needed_parts[worker]] if worker < 6 else [] for worker in range(8)]
    placement = assign_ranks(place_ranks(layout, sites, BYTES_BY_AXIS), sites, held_parts, needed_parts)
    assert placement == (6, 7, 0, 1, 2, 3, 4, 5)


def test_a_new_worker_takes_the_rank_of_the_lost_worker() -> None:
    layout = Layout(dp_shard=4, zero=3)
    held_parts: list[list[int]] = [[0], [2], [3, 1], []]
    assert assign_ranks((0, 1, 2, 3), [Site("", "one")] * 4, held_parts, compute_state_partition(layout)) == (
        0,
        3,
        1,
        2,
    )


@pytest.mark.parametrize("seed", range(60))
def test_as_many_workers_keep_their_state_as_in_the_best_exchange(seed: int) -> None:
    rng = random.Random(seed)
    ranks_per_node, num_nodes, num_racks = rng.choice([1, 2]), rng.choice([2, 3, 4]), rng.choice([1, 2])
    layout = Layout(tp=ranks_per_node, dp_shard=num_nodes, zero=1)
    needed_parts, world_size = compute_state_partition(layout), ranks_per_node * num_nodes
    sites = [
        Site(f"rack-{worker // ranks_per_node % num_racks}", f"node-{worker // ranks_per_node}")
        for worker in range(world_size)
    ]
    lost = rng.sample(range(world_size), rng.randrange(world_size))
    shuffled_parts = [needed_parts[rank] for rank in rng.sample(range(world_size), world_size)]
    held_parts = [[] if worker in lost else [shuffled_parts[worker]] for worker in range(world_size)]
    before = place_ranks(layout, sites, BYTES_BY_AXIS)
    placement = assign_ranks(before, sites, held_parts, needed_parts)
    assert sorted(placement) == list(range(world_size))
    assert compute_crossing_bytes(layout, [sites[w] for w in placement], BYTES_BY_AXIS) == compute_crossing_bytes(
        layout, [sites[w] for w in before], BYTES_BY_AXIS
    )
    if ranks_per_node == 1:  # with one worker per node, all exchanges can be tried
        legal = (
            exchange
            for exchange in permutations(range(world_size))
            if [sites[worker].rack for worker in exchange] == [sites[worker].rack for worker in before]
        )
        assert count_kept(placement, held_parts, needed_parts) == max(
            count_kept(exchange, held_parts, needed_parts) for exchange in legal
        )


def test_replicated_state_moves_no_worker() -> None:
    sites = [Site("", f"node-{worker}") for worker in range(3)]
    assert assign_ranks((2, 0, 1), sites, [[0]] * 3, [0, 0, 0]) == (2, 0, 1)
