"""Where ranks go: beside every assignment of small clusters, one by one, and by rule on large ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.elastic.state_partition import plan_replication_pairs
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.comm_volume import compute_bytes_by_axis
from raytrain_hpc.planner.layout import AXES, Batching, Layout
from raytrain_hpc.planner.placement import (
    Site,
    assign_workers_to_nodes,
    describe_placement,
    place_ranks,
    select_active_workers,
)
from raytrain_hpc.planner.topology import Node, Topology
from raytrain_hpc.planner.workload import Workload, make_workload

CLUSTERS = {"2 x 4": [4, 4], "4 x 2": [2, 2, 2, 2], "uneven": [4, 2, 2], "odd": [3, 3, 2]}
LAYOUTS = [
    Layout(dp_replicate=8),
    Layout(dp_replicate=4, pp=2),
    Layout(dp_replicate=2, pp=4),
    Layout(dp_replicate=2, tp=2, pp=2),
    Layout(dp_replicate=2, dp_shard=4, zero=3),
    Layout(dp_replicate=4, dp_shard=2, zero=1),
    Layout(dp_replicate=2, dp_shard=2, pp=2, zero=1),
    Layout(dp_shard=4, tp=2, zero=3),
]


def work(*words: str) -> Workload:
    config = load_config(None, ["train.seq_len=64", "train.global_batch=32", *words])
    return make_workload(config, resolve_model_spec(config.model, vocab_size=256, seq_len=64))


# Gradients are far more than what stages send one another, and the other way round.
WORKS = {
    "wide": (work("model.hidden_size=256"), Batching(32, 1)),
    "long": (work("train.global_batch=65536"), Batching(4096, 16)),
}


def slots(sizes: Sequence[int]) -> list[Site]:
    return [Site("", f"node {number}") for number, size in enumerate(sizes) for _ in range(size)]


def crossed(layout: Layout, nodes: Sequence[str], sent: dict[str, float]) -> float:
    """Bytes between nodes, by coordinates."""
    total = 0.0
    for rank in range(layout.world_size):
        at = layout.get_coordinates(rank)
        for axis, size in zip(AXES, layout.axis_sizes, strict=True):
            if size > 1 and (axis != "pp" or at[axis] + 1 < size):
                following = layout.get_rank({**at, axis: (at[axis] + 1) % size})
                total += sent[axis] * (nodes[rank] != nodes[following])
    return total


def assignments(groups: int, together: int, left: dict[str, int]) -> Iterator[list[str]]:
    """Every way to put so many groups on nodes with so many slots."""
    if groups == 0:
        yield []
        return
    for node, slots_left in left.items():
        if slots_left >= together:
            for rest in assignments(groups - 1, together, {**left, node: slots_left - together}):
                yield [node] * together + rest


@pytest.mark.parametrize("kind", WORKS)
@pytest.mark.parametrize(
    ("cluster", "layout"),
    [
        pytest.param(cluster, layout, id=f"{cluster}, {layout.describe()}")
        for cluster, sizes in CLUSTERS.items()
        for layout in LAYOUTS
        if all(size % layout.tp == 0 for size in sizes)
    ],
)
def test_the_fewest_bytes_of_all_assignments_leave_a_node(cluster: str, layout: Layout, kind: str) -> None:
    sent, sites = compute_bytes_by_axis(WORKS[kind][0], layout, WORKS[kind][1]), slots(CLUSTERS[cluster])
    places = place_ranks(layout, sites, sent)
    assert sorted(places) == list(range(8))
    nodes = [sites[place].node for place in places]
    least = min(
        crossed(layout, tried, sent)
        for tried in assignments(8 // layout.tp, layout.tp, dict(Counter(site.node for site in sites)))
    )
    assert crossed(layout, nodes, sent) == pytest.approx(least, rel=1e-12)


def test_what_sends_most_stays_near() -> None:
    """Stages go across nodes where gradients are large, and replicas where microbatches are many."""
    layout, sites = Layout(dp_replicate=4, pp=2), slots([4, 4])
    found = {}
    for kind, (task, batching) in WORKS.items():
        places = place_ranks(layout, sites, compute_bytes_by_axis(task, layout, batching))
        found[kind] = describe_placement(layout, [sites[place] for place in places])
    assert found == {"wide": "dp_replicate inside nodes, pp across 2", "long": "pp inside nodes, dp_replicate across 2"}


def test_nothing_known_of_traffic_leaves_ranks_in_order() -> None:
    assert place_ranks(Layout(dp_replicate=2, pp=2), slots([2, 2]), {}) == (0, 1, 2, 3)
    apart = [Site("", "b"), Site("", "a"), Site("", "b"), Site("", "a")]
    assert place_ranks(Layout(dp_replicate=4), apart, {}) == (1, 3, 0, 2)


def test_context_parallel_ranks_are_a_ring_over_the_nearest_nodes() -> None:
    """Two racks of two nodes of four: tp 2 x cp 2 is a node, cp 8 the ring once around."""
    sites = [Site(f"rack {number // 8}", f"node {number // 4}") for number in range(16)]
    task = work("model.hidden_size=64")
    inside = Layout(dp_replicate=4, cp=2, tp=2)
    places = place_ranks(inside, sites, compute_bytes_by_axis(task, inside, Batching(32, 1)))
    for rank in range(0, 16, 4):
        assert len({sites[place].node for place in places[rank : rank + 4]}) == 1
    ring = Layout(cp=8, tp=2)
    nodes = [sites[place] for place in place_ranks(ring, sites, compute_bytes_by_axis(task, ring, Batching(32, 1)))]
    neighbours = [(nodes[rank], nodes[(rank + 2) % 16]) for rank in range(0, 16, 2)]
    assert sum(one.node != other.node for one, other in neighbours) == 4
    assert sum(one.rack != other.rack for one, other in neighbours) == 2


def test_thousands_of_devices() -> None:
    config = load_config(None, ["model.preset=llama3_70b", "train.global_batch=2048", "train.dtype=bf16"])
    task = make_workload(config, resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len))
    layout = Layout(dp_shard=64, pp=8, tp=8, zero=1)
    sites = [Site(f"rack {node // 32:02}", f"node {node:03}") for node in range(512) for _ in range(8)]
    places = place_ranks(layout, sites, compute_bytes_by_axis(task, layout, Batching(2048, 1)))
    assert sorted(places) == list(range(4096))
    for first in range(0, 4096, 8):
        assert len({sites[place].node for place in places[first : first + 8]}) == 1


def topology(*nodes: tuple[int, str]) -> Topology:
    return Topology(tuple(Node(f"n{i}", "", slots, rack) for i, (slots, rack) in enumerate(nodes)), "cuda")


def test_the_fewest_racks_and_nodes_are_used() -> None:
    racked = topology((4, "a"), (8, "b"), (4, "a"), (8, "c"), (8, "c"))
    assert assign_workers_to_nodes(8, racked) == {"n0": 4, "n2": 4}, "the rack that is just large enough"
    assert assign_workers_to_nodes(16, racked) == {"n3": 8, "n4": 8}
    assert assign_workers_to_nodes(20, racked) == {"n3": 8, "n4": 8, "n0": 4}, "the largest, then one that is"
    assert assign_workers_to_nodes(6, topology((3, ""), (4, ""), (2, "")), group_size=2) == {"n1": 4, "n0": 2}
    with pytest.raises(ClusterError, match="use cluster.workers=9"):
        assign_workers_to_nodes(10, topology((3, ""), (4, ""), (2, "")))
    with pytest.raises(ClusterError, match="smaller parallel.tp"):
        assign_workers_to_nodes(6, topology((3, ""), (3, "")), group_size=2)


@pytest.mark.parametrize(
    ("there", "world", "together", "training"),
    [
        ({"a": 4, "b": 4}, 6, 1, {"a": 3, "b": 3}),
        ({"a": 4, "b": 4}, 7, 1, {"a": 4, "b": 3}),
        ({"a": 4, "b": 4}, 6, 2, {"a": 4, "b": 2}),
        ({"a": 4, "b": 4, "c": 4}, 8, 1, {"a": 4, "b": 4, "c": 0}),
        ({"a": 4, "b": 4, "c": 2}, 6, 1, {"a": 3, "b": 3, "c": 0}),
        ({"a": 3, "b": 2}, 4, 2, {"a": 2, "b": 2}),
        ({"a": 3, "b": 1}, 4, 2, None),
    ],
)
def test_spares_are_spread(there: dict[str, int], world: int, together: int, training: dict[str, int] | None) -> None:
    assert select_active_workers(there, world, together) == training


def test_copies_go_to_another_rack_where_there_is_one() -> None:
    sites = [Site("a", "1"), Site("a", "2"), Site("b", "3"), Site("b", "4")]
    pairs = dict(plan_replication_pairs(Layout(dp_shard=4, zero=3), sites))
    assert all(sites[source].rack != sites[buddy].rack for source, buddy in pairs.items())
    assert sorted(pairs) == sorted(pairs.values()) == [0, 1, 2, 3], "one each"
