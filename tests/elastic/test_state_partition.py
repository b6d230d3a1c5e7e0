"""Which ranks hold the same, and where copies of it go: checked against the rule itself, whoever is lost."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest

from raytrain_hpc.elastic.state_partition import (
    StatePart,
    compute_state_partition,
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


def test_replicas_and_context_parallel_peers_hold_the_same() -> None:
    assert compute_state_partition(Layout(dp_replicate=3)) == [0, 0, 0]
    assert compute_state_partition(Layout(dp_replicate=2, cp=2)) == [0, 0, 0, 0]
    assert compute_state_partition(Layout(dp_replicate=2, tp=2)) == [0, 1, 0, 1]
    assert compute_state_partition(Layout(dp_replicate=2, pp=2)) == [0, 0, 1, 1]
    assert compute_state_partition(Layout(dp_replicate=2, dp_shard=2, zero=3)) == [0, 1, 0, 1]
    assert compute_state_partition(Layout(dp_replicate=4, ep=2)) == [0, 1, 0, 1], (
        "other experts, though all else is the same"
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.describe())
@pytest.mark.parametrize("per_node", [1, 2, 3, 100])
def test_no_node_takes_a_part_away(layout: Layout, per_node: int) -> None:
    nodes = [f"node {rank // per_node}" for rank in range(layout.world_size)]
    if len(set(nodes)) == 1:
        nodes = [f"process {rank}" for rank in range(layout.world_size)]  # then processes are what can be lost alone
    pairs = plan_replication_pairs(layout, [Site("", node) for node in nodes])
    number = compute_state_partition(layout)
    held = {rank: {part} for rank, part in enumerate(number)}
    for source, buddy in pairs:
        held[buddy].add(number[source])
    for lost in set(nodes):
        left = set().union(*(held[rank] for rank in held if nodes[rank] != lost))
        assert left == set(number), f"without {lost}"
    for source, _ in pairs:
        assert {nodes[rank] for rank, part in enumerate(number) if part == number[source]} == {nodes[source]}
    kept = [sum(buddy == rank for _, buddy in pairs) for rank in range(layout.world_size)]
    assert layout.world_size % per_node or max(kept) <= 1, "evenly spread"


def test_one_node_protects_against_the_loss_of_a_process() -> None:
    site = Site("", "a")
    assert plan_replication_pairs(Layout(dp_shard=3, zero=3), [site] * 3) == ((0, 1), (1, 2), (2, 0))
    assert plan_replication_pairs(Layout(dp_replicate=3), [site] * 3) == ()
    assert plan_replication_pairs(Layout(), [site]) == ()


def test_the_newest_step_that_is_whole() -> None:
    """Against all subsets, by brute force."""
    states = [StatePart(1, part, 2, step) for part, step in product((0, 1), (4, 5))]
    for chosen in range(1 << len(states)):
        held = [state for bit, state in enumerate(states) if chosen >> bit & 1]
        whole = [step for step in (4, 5) if {0, 1} <= {state.part for state in held if state.step == step}]
        assert find_newest_complete_step([held[::2], held[1::2]]) == max(whole, default=None)
    assert find_newest_complete_step([]) is None


def test_parts_of_two_generations_do_not_make_a_whole() -> None:
    """One was cut in two and the other in three: part 1 of the one is none of the other."""
    of_two, of_three = [StatePart(1, 0, 2, 7)], [StatePart(2, 1, 3, 7), StatePart(2, 2, 3, 7)]
    assert find_newest_complete_step([of_two, of_three]) is None
    assert find_newest_complete_step([[*of_two, StatePart(1, 1, 2, 7)], of_three]) == 7
    assert find_newest_complete_step([[StatePart(1, 0, 2, 9), StatePart(1, 1, 2, 9)], [StatePart(2, 0, 1, 8)]]) == 9


@pytest.mark.parametrize("seed", range(150))
def test_buddies_are_those_that_a_look_at_everybody_finds(seed: int) -> None:
    """The rule as it is meant: on another rack, else another node, whoever keeps fewest copies, the next one first."""
    draw = random.Random(seed)
    sizes = {"dp_replicate": [1, 1, 2], "dp_shard": [1, 2, 3, 4], "pp": [1, 2, 3], "tp": [1, 2, 4], "zero": [1, 3]}
    layout = Layout(**{axis: draw.choice(choices) for axis, choices in sizes.items()})
    world, racks, a_node = layout.world_size, draw.choice([0, 2, 3]), draw.choice([1, 2, 3, 4, 8])
    numbers = [rank // a_node if seed % 2 else draw.randrange(4) for rank in range(world)]
    sites = [Site(f"rack-{number % racks}" if racks else "", f"node-{number}") for number in numbers]
    nodes = [site.node if len(set(numbers)) > 1 else str(rank) for rank, site in enumerate(sites)]
    holders: dict[int, list[int]] = {}
    for rank, part in enumerate(compute_state_partition(layout)):
        holders.setdefault(part, []).append(rank)
    kept: Counter[int] = Counter()
    wanted = []
    for ranks in holders.values():
        first = ranks[0]
        elsewhere = [rank for rank in range(world) if nodes[rank] != nodes[first]]
        if len({nodes[rank] for rank in ranks}) == 1 and elsewhere:
            buddy = min(
                elsewhere,
                key=lambda rank, first=first: (
                    sites[rank].rack == sites[first].rack,
                    kept[rank],
                    (rank - first) % world,
                ),
            )
            kept[buddy] += 1
            wanted.append((first, buddy))
    assert list(plan_replication_pairs(layout, sites)) == wanted
