"""Placement: the number of workers per node, and which worker gets which rank, so that heavy traffic stays local."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.layout import AXES, Layout
from raytrain_hpc.planner.topology import Node, Topology

_PERMUTED_AXES = ("pp", "dp_replicate", "dp_shard")  # tp and cp stay innermost: every layer waits for them


_MAX_SWAPPED_GROUPS = 24  # groups; the number of pairs grows quadratically


@dataclass(frozen=True, order=True)
class Site:
    """The location of a worker: its node, and the rack or switch of that node, empty if unknown."""

    rack: str
    node: str


def count_max_ranks_per_node(sites: Sequence[Site]) -> int:
    """Return the largest number of ranks on one node. `sites`: of each rank."""
    return max(Counter(site.node for site in sites).values())


def assign_workers_to_nodes(world_size: int, topology: Topology, group_size: int = 1) -> dict[str, int]:
    """Return the number of workers on each node used, by node id. Each entry becomes one placement group bundle.

    As few nodes as possible are used: the smallest rack that is large enough, else the largest racks, and in a rack the
    largest nodes first. Groups of `group_size` adjacent ranks (tensor-parallel groups) never span two nodes. Raises
    ClusterError if the cluster has too few slots.
    """
    if world_size > topology.total_slots:
        raise ClusterError(
            f"cluster.workers={world_size}: the cluster has {topology.total_slots} free {topology.ray_resource} slots "
            f"on {len(topology.nodes)} nodes; use cluster.workers={topology.total_slots} or add nodes"
        )
    slots_by_rack: Counter[str] = Counter()
    for node in topology.nodes:
        slots_by_rack[node.rack] += node.slots

    def preference(node: Node) -> tuple[bool, int, str, int, str]:
        rack_slots = slots_by_rack[node.rack]
        return (
            rack_slots < world_size,
            rack_slots if rack_slots >= world_size else -rack_slots,
            node.rack,
            -node.slots,
            node.id,
        )

    workers_by_node, remaining = {}, world_size
    for node in sorted(topology.nodes, key=preference):
        num_workers = min(remaining, node.slots // group_size * group_size)
        if num_workers:
            workers_by_node[node.id] = num_workers
            remaining -= num_workers
    if remaining:
        slots = ", ".join(str(node.slots) for node in topology.nodes)
        raise ClusterError(
            f"parallel.tp={group_size}: {world_size // group_size} groups of {group_size} ranks, each within one node, "
            f"do not fit on nodes with {slots} slots; use a smaller parallel.tp or larger nodes"
        )
    return workers_by_node


def select_active_workers(
    workers_per_node: Mapping[str, int], world_size: int, group_size: int = 1
) -> dict[str, int] | None:
    """Return how many workers on each node train; the others are spares. None if too few groups of `group_size` fit.

    Each group is on one node. Whole nodes are left as spares if possible, which makes up for the loss of a node.
    Remaining spares are spread evenly, so that no single node holds all of them.
    """
    counts = {node: count // group_size * group_size for node, count in workers_per_node.items()}
    excess = sum(counts.values()) - world_size
    if excess < 0:
        return None
    for node in sorted(sorted(counts, reverse=True), key=lambda node: counts[node]):
        if 0 < counts[node] <= excess:
            excess -= counts[node]
            counts[node] = 0
    while excess >= group_size:
        fullest = max(counts, key=lambda node: (counts[node], node))
        counts[fullest] -= group_size
        excess -= group_size
    return counts if excess == 0 else None


def place_ranks(layout: Layout, sites: Sequence[Site], bytes_by_axis: Mapping[str, float]) -> tuple[int, ...]:
    """Return the index into `sites` for each rank, so that the fewest bytes cross nodes.

    `bytes_by_axis[axis]`: bytes that a rank sends per step to the next rank along an axis, see `compute_bytes_by_axis`.
    Bytes between racks count twice.

    Tensor-parallel ranks are placed innermost, then context-parallel ranks, both inside a node if they fit. All orders
    of the other axes are tried, and the mesh's own order wins ties. If the nodes have different sizes, small layouts
    are improved by swapping tensor-parallel groups as long as that helps.
    """
    order = sorted(range(len(sites)), key=lambda index: (sites[index], index))
    best: tuple[float, tuple[int, ...]] | None = None
    if len(set(sites)) == 1:
        return tuple(order)
    movable = [axis for axis in _PERMUTED_AXES if getattr(layout, axis) > 1]
    for outer in permutations(movable):
        sequence = _list_ranks_in_order(layout, (*outer, "cp", "tp"))
        placement = [0] * layout.world_size
        for index, rank in zip(order, sequence, strict=True):
            placement[rank] = index
        crossing_bytes = compute_crossing_bytes(layout, [sites[index] for index in placement], bytes_by_axis)
        if best is None or crossing_bytes < best[0]:
            best = crossing_bytes, tuple(placement)
    if best is None:
        return tuple(order)
    workers_by_site = Counter(sites)
    is_uneven, num_groups = len(set(workers_by_site.values())) > 1, layout.world_size // layout.tp
    return (
        _swap_groups(layout, best, sites, bytes_by_axis) if is_uneven and num_groups <= _MAX_SWAPPED_GROUPS else best[1]
    )


def _swap_groups(
    layout: Layout, initial: tuple[float, tuple[int, ...]], sites: Sequence[Site], bytes_by_axis: Mapping[str, float]
) -> tuple[int, ...]:
    """Swap pairs of tensor-parallel groups as long as a swap saves bytes, and return the placement."""
    crossing_bytes, placement = initial
    tp, improved = layout.tp, True
    while improved:
        improved = False
        for first, second in combinations(range(0, layout.world_size, tp), 2):
            if sites[placement[first]] == sites[placement[second]]:
                continue
            candidate = list(placement)
            candidate[first : first + tp], candidate[second : second + tp] = (
                placement[second : second + tp],
                placement[first : first + tp],
            )
            candidate_bytes = compute_crossing_bytes(layout, [sites[index] for index in candidate], bytes_by_axis)
            if candidate_bytes < crossing_bytes:
                crossing_bytes, placement, improved = candidate_bytes, tuple(candidate), True
    return placement


def compute_crossing_bytes(layout: Layout, sites: Sequence[Site], bytes_by_axis: Mapping[str, float]) -> float:
    """Return the bytes sent between nodes per step, with those between racks counted twice.

    `sites[r]` is the site of rank r. Ranks along an axis send in a ring, pipeline stages in a line.
    """
    total, stride = 0.0, 1
    for axis in reversed(AXES):
        size, bytes_sent = getattr(layout, axis), bytes_by_axis.get(axis, 0.0)
        if size > 1 and bytes_sent:
            distance_sum = sum(
                _compute_distance(sites[rank], sites[rank + stride * ((coordinate + 1) % size - coordinate)])
                for rank in range(layout.world_size)
                if (coordinate := rank // stride % size) + 1 < size or axis != "pp"
            )
            total += distance_sum * bytes_sent
        stride *= size
    return total


def _compute_distance(first: Site, second: Site) -> int:
    return (first.node != second.node) + (first.rack != second.rack)


def _list_ranks_in_order(layout: Layout, axes: Sequence[str]) -> list[int]:
    """Return all ranks in row-major order over `axes`, the last of which varies fastest."""
    strides, stride = {}, 1
    for axis in reversed(AXES):
        strides[axis] = stride
        stride *= getattr(layout, axis)
    ranks = [0]
    for axis in axes:
        ranks = [rank + step * strides[axis] for rank in ranks for step in range(getattr(layout, axis))]
    return ranks


def describe_placement(layout: Layout, sites: Sequence[Site]) -> str:
    """Describe which axes stay inside nodes and which cross them. `sites[r]` is the site of rank r."""
    nodes = Counter(site.node for site in sites)
    if len(nodes) == 1:
        return "all on one node"
    inside: list[str] = []
    across: list[str] = []
    for axis in reversed(AXES):
        if getattr(layout, axis) > 1:
            unit_bytes = {axis: 1.0}
            (across if compute_crossing_bytes(layout, sites, unit_bytes) else inside).append(axis)
    inside_text = f"{', '.join(inside)} inside nodes" if inside else ""
    return ", ".join(filter(None, [inside_text, f"{', '.join(across)} across {len(nodes)}" if across else ""]))
