"""Which node gets how many workers, and which of them which rank: what sends most to one another stays near."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.layout import AXES, Layout
from raytrain_hpc.planner.topology import Node, Topology

_PERMUTED_AXES = ("pp", "dp_replicate", "dp_shard")  # tp and cp, on whose exchanges every layer waits, stay innermost


_MAX_SWAPPED_GROUPS = 24  # groups: pairs grow with the square


@dataclass(frozen=True, order=True)
class Site:
    """Where a worker is: its node, and the rack or switch that this hangs on, if anything is known of that."""

    rack: str
    node: str


def assign_workers_to_nodes(world_size: int, topology: Topology, group_size: int = 1) -> dict[str, int]:
    """Workers on each node used, by its id: one node-shaped bundle each.

    The rack that is just large enough, or else the largest ones, and of a rack the largest nodes first, so that the run
    touches as few as possible; `together` neighbouring ranks (a tensor-parallel group) never straddle two nodes. Raises
    ClusterError where the cluster has too few slots.
    """
    if world_size > topology.total_slots:
        kind = "GPU" if topology.device == "cuda" else "CPU"
        raise ClusterError(
            f"cluster.workers={world_size}: the cluster has {topology.total_slots} free {kind} slots on {len(topology.nodes)} "
            f"nodes; use cluster.workers={topology.total_slots} or add nodes"
        )
    racks: Counter[str] = Counter()
    for node in topology.nodes:
        racks[node.rack] += node.slots

    def preference(node: Node) -> tuple[bool, int, str, int, str]:
        there = racks[node.rack]
        return there < world_size, there if there >= world_size else -there, node.rack, -node.slots, node.id

    shares, left = {}, world_size
    for node in sorted(topology.nodes, key=preference):
        share = min(left, node.slots // group_size * group_size)
        if share:
            shares[node.id] = share
            left -= share
    if left:
        slots = ", ".join(str(node.slots) for node in topology.nodes)
        raise ClusterError(
            f"parallel.tp={group_size}: {world_size // group_size} groups of {group_size} ranks do not fit, each within one node, "
            f"on nodes with {slots} slots; use a smaller parallel.tp or larger nodes"
        )
    return shares


def select_active_workers(
    workers_per_node: Mapping[str, int], world_size: int, group_size: int = 1
) -> dict[str, int] | None:
    """How many of the workers on each node train, the others being spares; None where groups of `together`, each on
    one node, make too few.

    Whole nodes are left to spares as long as there are so many, which makes up for the loss of a node; then each node
    keeps about as many, so that no node's loss takes all of them.
    """
    taken = {node: count // group_size * group_size for node, count in workers_per_node.items()}
    over = sum(taken.values()) - world_size
    if over < 0:
        return None
    for node in sorted(sorted(taken, reverse=True), key=lambda node: taken[node]):
        if 0 < taken[node] <= over:
            over -= taken[node]
            taken[node] = 0
    while over >= group_size:
        fullest = max(taken, key=lambda node: (taken[node], node))
        taken[fullest] -= group_size
        over -= group_size
    return taken if over == 0 else None


def place_ranks(layout: Layout, sites: Sequence[Site], bytes_by_axis: Mapping[str, float]) -> tuple[int, ...]:
    """Which of the sites each rank gets, as indexes, so that the fewest bytes leave a node, and a rack twice counted.

    `sent[axis]`: bytes that a rank sends to the next one along an axis in a step (plan.traffic). Sites in order of
    racks and nodes take tensor-parallel ranks first, context-parallel ones next, so that both are inside a node as long
    as they fit, and then a ring over the nearest; of the orders of all other axes the best, of equals the mesh's own.
    Where nodes are uneven, which cuts through every order, a few groups change places as long as that helps.
    """
    order = sorted(range(len(sites)), key=lambda index: (sites[index], index))
    best: tuple[float, tuple[int, ...]] | None = None
    if len(set(sites)) == 1:
        return tuple(order)
    movable = [axis for axis in _PERMUTED_AXES if getattr(layout, axis) > 1]
    for outer in permutations(movable):
        sequence = _list_ranks_in_order(layout, (*outer, "cp", "tp"))
        placed = [0] * layout.world_size
        for index, rank in zip(order, sequence, strict=True):
            placed[rank] = index
        crossed = compute_crossing_bytes(layout, [sites[index] for index in placed], bytes_by_axis)
        if best is None or crossed < best[0]:
            best = crossed, tuple(placed)
    if best is None:
        return tuple(order)
    there = Counter(sites)
    uneven, groups = len(set(there.values())) > 1, layout.world_size // layout.tp
    return _swap_groups(layout, best, sites, bytes_by_axis) if uneven and groups <= _MAX_SWAPPED_GROUPS else best[1]


def _swap_groups(
    layout: Layout, initial: tuple[float, tuple[int, ...]], sites: Sequence[Site], bytes_by_axis: Mapping[str, float]
) -> tuple[int, ...]:
    """The same places with tensor-parallel groups exchanged, pair by pair, for as long as any exchange helps."""
    crossed, placed = initial
    tp, improved = layout.tp, True
    while improved:
        improved = False
        for one, other in combinations(range(0, layout.world_size, tp), 2):
            if sites[placed[one]] == sites[placed[other]]:
                continue
            tried = list(placed)
            tried[one : one + tp], tried[other : other + tp] = placed[other : other + tp], placed[one : one + tp]
            now = compute_crossing_bytes(layout, [sites[index] for index in tried], bytes_by_axis)
            if now < crossed:
                crossed, placed, improved = now, tuple(tried), True
    return placed


def compute_crossing_bytes(layout: Layout, sites: Sequence[Site], bytes_by_axis: Mapping[str, float]) -> float:
    """Bytes a step between ranks on different nodes, those between racks counted twice. `sites[r]`: rank r's.

    Ranks along an axis send in a ring, stages of a pipeline in a row.
    """
    total, stride = 0.0, 1
    for axis in reversed(AXES):
        size, bytes_sent = getattr(layout, axis), bytes_by_axis.get(axis, 0.0)
        if size > 1 and bytes_sent:
            edges = sum(
                _compute_distance(sites[rank], sites[rank + stride * ((at + 1) % size - at)])
                for rank in range(layout.world_size)
                if (at := rank // stride % size) + 1 < size or axis != "pp"
            )
            total += edges * bytes_sent
        stride *= size
    return total


def _compute_distance(first: Site, second: Site) -> int:
    return (first.node != second.node) + (first.rack != second.rack)


def _list_ranks_in_order(layout: Layout, axes: Sequence[str]) -> list[int]:
    """All ranks, those that differ in the last of these axes next to one another."""
    strides, stride = {}, 1
    for axis in reversed(AXES):
        strides[axis] = stride
        stride *= getattr(layout, axis)
    ranks = [0]
    for axis in axes:
        ranks = [rank + step * strides[axis] for rank in ranks for step in range(getattr(layout, axis))]
    return ranks


def describe_placement(layout: Layout, sites: Sequence[Site]) -> str:
    """Which axes stay inside nodes and which cross them, in a phrase. `sites[r]`: rank r's."""
    nodes = Counter(site.node for site in sites)
    if len(nodes) == 1:
        return "all on one node"
    inside: list[str] = []
    across: list[str] = []
    for axis in reversed(AXES):
        if getattr(layout, axis) > 1:
            one = {axis: 1.0}
            (across if compute_crossing_bytes(layout, sites, one) else inside).append(axis)
    kept = f"{', '.join(inside)} inside nodes" if inside else ""
    return ", ".join(filter(None, [kept, f"{', '.join(across)} across {len(nodes)}" if across else ""]))
