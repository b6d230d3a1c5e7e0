"""Placement against a search over all assignments, and the number of workers per node."""

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
    Layout(dp_replicate=2, tp=4),
]


def make_test_workload(*overrides: str) -> Workload:
    config = load_config(None, ["train.seq_len=64", "train.global_batch_size=32", *overrides])
    return make_workload(config, resolve_model_spec(config.model, vocab_size=256, seq_len=64))


# In one case gradients dominate the traffic, in the other what pipeline stages send.
WORKLOADS = {
    "wide": (make_test_workload("model.hidden_size=256"), Batching(32, 1)),
    "long": (make_test_workload("train.global_batch_size=65536"), Batching(4096, 16)),
}


def make_sites(sizes: Sequence[int]) -> list[Site]:
    return [Site("", f"node {number}") for number, size in enumerate(sizes) for _ in range(size)]


def count_crossed_bytes(layout: Layout, nodes: Sequence[str], bytes_by_axis: dict[str, float]) -> float:
    """Return the bytes between nodes, computed from coordinates."""
    total = 0.0
    for rank in range(layout.world_size):
        coordinates = layout.get_coordinates(rank)
        for axis, size in zip(AXES, layout.axis_sizes, strict=True):
            if size > 1 and (axis != "pp" or coordinates[axis] + 1 < size):
                next_rank = layout.get_rank({**coordinates, axis: (coordinates[axis] + 1) % size})
                total += bytes_by_axis[axis] * (nodes[rank] != nodes[next_rank])
    return total


def list_assignments(groups: int, group_size: int, free_slots: dict[str, int]) -> Iterator[list[str]]:
    """Yield every assignment of `groups` groups to nodes with `free_slots` free slots."""
    if groups == 0:
        yield []
        return
    for node, slots_left in free_slots.items():
        if slots_left >= group_size:
            for other_groups in list_assignments(groups - 1, group_size, {**free_slots, node: slots_left - group_size}):
                yield [node] * group_size + other_groups


@pytest.mark.parametrize("kind", WORKLOADS)
@pytest.mark.parametrize(
    ("cluster", "layout"),
    [
        pytest.param(cluster, layout, id=f"{cluster}, {layout.describe()}")
        for cluster, sizes in CLUSTERS.items()
        for layout in LAYOUTS
        if all(size % layout.tp == 0 for size in sizes)
    ],
)
def test_no_assignment_sends_fewer_bytes_between_nodes(cluster: str, layout: Layout, kind: str) -> None:
    bytes_by_axis, sites = (
        compute_bytes_by_axis(WORKLOADS[kind][0], layout, WORKLOADS[kind][1]),
        make_sites(CLUSTERS[cluster]),
    )
    placement = place_ranks(layout, sites, bytes_by_axis)
    assert sorted(placement) == list(range(8))
    nodes = [sites[index].node for index in placement]
    fewest = min(
        count_crossed_bytes(layout, assignment, bytes_by_axis)
        for assignment in list_assignments(8 // layout.tp, layout.tp, dict(Counter(site.node for site in sites)))
    )
    assert count_crossed_bytes(layout, nodes, bytes_by_axis) == pytest.approx(fewest, rel=1e-12)


def test_the_heaviest_traffic_stays_inside_nodes() -> None:
    """Stages cross nodes if gradients are large, and replicas if microbatches are many."""
    layout, sites = Layout(dp_replicate=4, pp=2), make_sites([4, 4])
    descriptions = {}
    for kind, (workload, batching) in WORKLOADS.items():
        placement = place_ranks(layout, sites, compute_bytes_by_axis(workload, layout, batching))
        descriptions[kind] = describe_placement(layout, [sites[index] for index in placement])
    assert descriptions == {
        "wide": "dp_replicate inside nodes, pp across 2",
        "long": "pp inside nodes, dp_replicate across 2",
    }


def test_unknown_traffic_keeps_ranks_in_order() -> None:
    assert place_ranks(Layout(dp_replicate=2, pp=2), make_sites([2, 2]), {}) == (0, 1, 2, 3)
    alternating = [Site("", "b"), Site("", "a"), Site("", "b"), Site("", "a")]
    assert place_ranks(Layout(dp_replicate=4), alternating, {}) == (1, 3, 0, 2)


def test_context_parallel_ranks_form_a_ring_over_adjacent_nodes() -> None:
    """Two racks of two nodes of four devices: tp 2 x cp 2 is a node, cp 8 goes once around the ring."""
    sites = [Site(f"rack {number // 8}", f"node {number // 4}") for number in range(16)]
    workload = make_test_workload("model.hidden_size=64")
    inside = Layout(dp_replicate=4, cp=2, tp=2)
    placement = place_ranks(inside, sites, compute_bytes_by_axis(workload, inside, Batching(32, 1)))
    for rank in range(0, 16, 4):
        assert len({sites[index].node for index in placement[rank : rank + 4]}) == 1
    ring = Layout(cp=8, tp=2)
    nodes = [sites[index] for index in place_ranks(ring, sites, compute_bytes_by_axis(workload, ring, Batching(32, 1)))]
    neighbors = [(nodes[rank], nodes[(rank + 2) % 16]) for rank in range(0, 16, 2)]
    assert sum(first.node != second.node for first, second in neighbors) == 4
    assert sum(first.rack != second.rack for first, second in neighbors) == 2


def test_thousands_of_devices_are_placed() -> None:
    config = load_config(None, ["model.preset=llama3_70b", "train.global_batch_size=2048", "train.dtype=bf16"])
    workload = make_workload(config, resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len))
    layout = Layout(dp_shard=64, pp=8, tp=8, zero=1)
    sites = [Site(f"rack {node // 32:02}", f"node {node:03}") for node in range(512) for _ in range(8)]
    placement = place_ranks(layout, sites, compute_bytes_by_axis(workload, layout, Batching(2048, 1)))
    assert sorted(placement) == list(range(4096))
    for first in range(0, 4096, 8):
        assert len({sites[index].node for index in placement[first : first + 8]}) == 1


def make_topology(*nodes: tuple[int, str]) -> Topology:
    return Topology(tuple(Node(f"n{i}", "", slots, rack) for i, (slots, rack) in enumerate(nodes)), "cuda")


def test_as_few_racks_and_nodes_as_possible_are_used() -> None:
    racked = make_topology((4, "a"), (8, "b"), (4, "a"), (8, "c"), (8, "c"))
    assert assign_workers_to_nodes(8, racked) == {"n0": 4, "n2": 4}, "the smallest rack that is large enough"
    assert assign_workers_to_nodes(16, racked) == {"n3": 8, "n4": 8}
    assert assign_workers_to_nodes(20, racked) == {"n3": 8, "n4": 8, "n0": 4}, "the largest rack, then the next"
    assert assign_workers_to_nodes(6, make_topology((3, ""), (4, ""), (2, "")), group_size=2) == {"n1": 4, "n0": 2}
    uneven = make_topology((4, ""), (4, ""), (3, ""))
    assert assign_workers_to_nodes(8, uneven, group_size=4) == {"n0": 4, "n1": 4}
    assert assign_workers_to_nodes(11, uneven) == {"n0": 4, "n1": 4, "n2": 3}, "every slot"
    with pytest.raises(ClusterError, match="use cluster.workers=9"):
        assign_workers_to_nodes(10, make_topology((3, ""), (4, ""), (2, "")))
    with pytest.raises(ClusterError, match="smaller parallel.tp"):
        assign_workers_to_nodes(6, make_topology((3, ""), (3, "")), group_size=2)


@pytest.mark.parametrize(
    ("workers_per_node", "world_size", "group_size", "expected"),
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
def test_spares_take_whole_nodes_or_are_spread(
    workers_per_node: dict[str, int], world_size: int, group_size: int, expected: dict[str, int] | None
) -> None:
    assert select_active_workers(workers_per_node, world_size, group_size) == expected


def test_replicas_go_to_another_rack_if_there_is_one() -> None:
    sites = [Site("a", "1"), Site("a", "2"), Site("b", "3"), Site("b", "4")]
    pairs = dict(plan_replication_pairs(Layout(dp_shard=4, zero=3), sites))
    assert all(sites[source].rack != sites[target].rack for source, target in pairs.items())
    assert sorted(pairs) == sorted(pairs.values()) == [0, 1, 2, 3], "one replica each"
