"""State partition and replication pairs, checked against their rules for every node or process that can be lost."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from raytrain_hpc.elastic.state_partition import (
    StatePart,
    assign_missing_parts,
    compute_state_partition,
    find_complete_generation,
    find_newest_complete_step,
    plan_replication_pairs,
)
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.placement import Site

LAYOUTS = [
    Layout(dp_replicate=3),
    Layout(dp_shard=4, zero=3),
    Layout(dp_shard=2, dp_replicate=2, zero=1),
    Layout(dp_replicate=2, tp=2),
    Layout(dp_replicate=2, pp=2),
    Layout(pp=2, dp_replicate=3, tp=2),
    Layout(cp=2, tp=2, pp=2),
    Layout(dp_replicate=4, ep=2),
    Layout(dp_shard=4, ep=2, zero=3),
    Layout(dp_shard=3, dp_replicate=2, pp=2, zero=1),
]


def test_replicas_and_context_parallel_peers_hold_the_same_part() -> None:
    assert compute_state_partition(Layout(dp_replicate=3)) == [0, 0, 0]
    assert compute_state_partition(Layout(dp_replicate=2, cp=2)) == [0, 0, 0, 0]
    assert compute_state_partition(Layout(dp_replicate=2, tp=2)) == [0, 1, 0, 1]
    assert compute_state_partition(Layout(dp_replicate=2, pp=2)) == [0, 0, 1, 1]
    assert compute_state_partition(Layout(dp_replicate=2, dp_shard=2, zero=3)) == [0, 1, 0, 1]
    assert compute_state_partition(Layout(dp_replicate=4, ep=2)) == [0, 1, 0, 1], (
        "different experts, although everything else is the same"
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
@pytest.mark.parametrize("per_node", [1, 2, 3, 100])
def test_no_lost_node_destroys_a_part(layout: Layout, per_node: int) -> None:
    nodes = [f"node {rank // per_node}" for rank in range(layout.world_size)]
    if len(set(nodes)) == 1:
        nodes = [f"process {rank}" for rank in range(layout.world_size)]  # only processes can be lost alone
    pairs = plan_replication_pairs(layout, [Site("", node) for node in nodes])
    part_of_rank = compute_state_partition(layout)
    parts_by_rank = {rank: {part} for rank, part in enumerate(part_of_rank)}
    for source, target in pairs:
        parts_by_rank[target].add(part_of_rank[source])
    for lost in set(nodes):
        remaining = set().union(*(parts_by_rank[rank] for rank in parts_by_rank if nodes[rank] != lost))
        assert remaining == set(part_of_rank), f"without {lost}"
    for source, _ in pairs:
        assert {nodes[rank] for rank, part in enumerate(part_of_rank) if part == part_of_rank[source]} == {
            nodes[source]
        }
    replica_counts = [sum(target == rank for _, target in pairs) for rank in range(layout.world_size)]
    assert layout.world_size % per_node or max(replica_counts) <= 1, "replicas are spread evenly"


def test_replicas_on_one_node_survive_the_loss_of_a_process() -> None:
    site = Site("", "a")
    assert plan_replication_pairs(Layout(dp_shard=3, zero=3), [site] * 3) == ((0, 1), (1, 2), (2, 0))
    assert plan_replication_pairs(Layout(dp_replicate=3), [site] * 3) == ()
    assert plan_replication_pairs(Layout(), [site]) == ()


def test_the_newest_complete_step_is_found() -> None:
    """Against all subsets, by brute force."""
    states = [StatePart(1, part, 2, step) for part, step in product((0, 1), (4, 5))]
    for chosen in range(1 << len(states)):
        held_parts = [state for bit, state in enumerate(states) if chosen >> bit & 1]
        complete = [step for step in (4, 5) if {0, 1} <= {state.part for state in held_parts if state.step == step}]
        assert find_newest_complete_step([held_parts[::2], held_parts[1::2]]) == max(complete, default=None)
    assert find_newest_complete_step([]) is None


def test_parts_of_different_generations_are_not_combined() -> None:
    """One generation has two parts and the other three. Part 1 of one is not part 1 of the other."""
    of_two, of_three = [StatePart(1, 0, 2, 7)], [StatePart(2, 1, 3, 7), StatePart(2, 2, 3, 7)]
    assert find_newest_complete_step([of_two, of_three]) is None
    assert find_newest_complete_step([[*of_two, StatePart(1, 1, 2, 7)], of_three]) == 7
    assert find_newest_complete_step([[StatePart(1, 0, 2, 9), StatePart(1, 1, 2, 9)], [StatePart(2, 0, 1, 8)]]) == 9


@pytest.mark.parametrize("seed", range(150))
def test_replication_pairs_are_those_of_an_exhaustive_search(seed: int) -> None:
    """Each replica goes to another rack, else to another node, to the next rank with the fewest replicas."""
    rng = random.Random(seed)
    sizes = {"dp_replicate": [1, 1, 2], "dp_shard": [1, 2, 3, 4], "pp": [1, 2, 3], "tp": [1, 2, 4], "zero": [1, 3]}
    layout = Layout(**{axis: rng.choice(choices) for axis, choices in sizes.items()})
    world_size, num_racks, ranks_per_node = layout.world_size, rng.choice([0, 2, 3]), rng.choice([1, 2, 3, 4, 8])
    node_numbers = [rank // ranks_per_node if seed % 2 else rng.randrange(4) for rank in range(world_size)]
    sites = [Site(f"rack-{number % num_racks}" if num_racks else "", f"node-{number}") for number in node_numbers]
    failure_domains = [site.node if len(set(node_numbers)) > 1 else str(rank) for rank, site in enumerate(sites)]
    holders: dict[int, list[int]] = {}
    for rank, part in enumerate(compute_state_partition(layout)):
        holders.setdefault(part, []).append(rank)
    replica_counts: Counter[int] = Counter()
    expected = []
    for ranks in holders.values():
        first = ranks[0]
        others = [rank for rank in range(world_size) if failure_domains[rank] != failure_domains[first]]
        if len({failure_domains[rank] for rank in ranks}) == 1 and others:
            target = min(
                others,
                key=lambda rank, first=first: (
                    sites[rank].rack == sites[first].rack,
                    replica_counts[rank],
                    (rank - first) % world_size,
                ),
            )
            replica_counts[target] += 1
            expected.append((first, target))
    assert list(plan_replication_pairs(layout, sites)) == expected


def test_missing_parts_are_opened_once_and_evenly() -> None:
    """For any holders, the members have all parts of the step together, and open no part that a member has."""
    generator = random.Random(0)
    for _ in range(300):
        num_parts, num_members = generator.randint(1, 6), generator.randint(1, 5)
        parts = [StatePart(2, part, num_parts, 7) for part in range(num_parts)]
        others = [StatePart(1, 0, 3, 7), StatePart(2, 0, num_parts, 6), StatePart(1, 2, 3, 7)]
        own = [generator.sample(parts, generator.randint(0, num_parts // 2)) for _ in range(num_members)]
        nodes = [generator.randint(0, 1) for _ in range(num_members)]
        held = {node: [*generator.sample(parts, generator.randint(0, num_parts)), *others] for node in (0, 1)}
        nearby = [held[node] for node in nodes]
        complete = {part for of_member in (*own, *nearby) for part in of_member} >= set(parts)
        assert find_complete_generation(7, [*own, *nearby]) == (2 if complete else None)
        assigned = assign_missing_parts(2, 7, own, nearby)
        opened = [part for of_member in assigned for part in of_member]
        in_members = {part for of_member in own for part in of_member}
        assert len(set(opened)) == len(opened) and not set(opened) & (in_members | set(others))
        assert all(part in nearby[member] for member, of_member in enumerate(assigned) for part in of_member)
        if complete:
            assert in_members | set(opened) >= set(parts)
        if len(set(nodes)) == 1:
            counts = [len(of_member) for of_member in assigned]
            assert max(counts) - min(counts) <= 1


def test_parts_of_several_generations_are_not_combined() -> None:
    halves = [StatePart(generation, part, 2, 5) for generation, part in ((1, 0), (2, 1))]
    assert find_complete_generation(5, [halves]) is None
    assert find_complete_generation(5, [halves, [StatePart(1, 1, 2, 5)]]) == 1
    assert find_complete_generation(5, [halves, [StatePart(1, 1, 2, 5), StatePart(2, 0, 2, 5)]]) == 2
