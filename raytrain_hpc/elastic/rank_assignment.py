"""Rank assignment: reorder ranks so that workers keep the state they hold and less of it is transferred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from raytrain_hpc.planner.placement import Site


def assign_ranks(
    placement: Sequence[int], sites: Sequence[Site], held_parts: Sequence[Sequence[int]], needed_parts: Sequence[int]
) -> tuple[int, ...]:
    """Return the placement with workers exchanged so that as many as possible hold the state part of their rank.

    Call after `place_ranks`, when the next generation is planned. `placement[r]`: worker of rank r. `sites[w]`: rack
    and node of worker w. `held_parts[w]`: state parts in the memory of worker w, its own before replicas.
    `needed_parts[r]`: state part of rank r, see `compute_state_partition`.

    Whole nodes of one rack with equally many ranks are exchanged, and workers within a node. No two ranks move nearer
    or further apart, so the communication cost of the placement is unchanged.
    """
    ranks_by_node: dict[Site, list[int]] = {}
    for rank, worker in enumerate(placement):
        ranks_by_node.setdefault(sites[worker], []).append(rank)
    if len(set(needed_parts)) == 1:  # all ranks hold the same state
        return tuple(placement)
    exchangeable: dict[Hashable, list[Site]] = {}
    for node, ranks in ranks_by_node.items():
        exchangeable.setdefault((node.rack, len(ranks)), []).append(node)
    assignment = list(placement)
    for nodes in exchangeable.values():
        workers_by_node = {node: [placement[rank] for rank in ranks_by_node[node]] for node in nodes}
        for node, target in _match_nodes(nodes, workers_by_node, ranks_by_node, held_parts, needed_parts).items():
            for rank, worker in _assign_on_node(
                ranks_by_node[target], workers_by_node[node], held_parts, needed_parts
            ).items():
                assignment[rank] = worker
    return tuple(assignment)


def _match_nodes(
    nodes: Sequence[Site],
    workers_by_node: dict[Site, list[int]],
    ranks_by_node: dict[Site, list[int]],
    held_parts: Sequence[Sequence[int]],
    needed_parts: Sequence[int],
) -> dict[Site, Site]:
    """Return, for each node, the node whose ranks its workers get.

    Greedy: the pair of nodes with the most state parts in common is matched first.
    """
    nodes_needing: dict[int, list[int]] = {}  # state part -> indexes into `nodes`
    for index, node in enumerate(nodes):
        for part in {needed_parts[rank] for rank in ranks_by_node[node]}:
            nodes_needing.setdefault(part, []).append(index)
    overlaps = []
    for index, node in enumerate(nodes):
        own_parts = {part for worker in workers_by_node[node] for part in held_parts[worker][:1]}
        all_parts = {part for worker in workers_by_node[node] for part in held_parts[worker]}
        counts = Counter(target for part in all_parts for target in nodes_needing.get(part, ()))
        # A worker's own part counts twice, so that most workers keep their rank.
        counts.update(target for part in own_parts for target in nodes_needing.get(part, ()))
        overlaps += [(-count, index != target, index, target) for target, count in counts.items()]
    target_of: dict[int, int] = {}
    taken_targets: set[int] = set()
    for _, _, index, target in sorted(overlaps):
        if index not in target_of and target not in taken_targets:
            target_of[index] = target
            taken_targets.add(target)
    free_targets = iter(index for index in range(len(nodes)) if index not in taken_targets)
    return {nodes[n]: nodes[target_of[n] if n in target_of else next(free_targets)] for n in range(len(nodes))}


def _assign_on_node(
    ranks: Sequence[int], workers: Sequence[int], held_parts: Sequence[Sequence[int]], needed_parts: Sequence[int]
) -> dict[int, int]:
    """Assign the workers of a node to these ranks, first by their own state part, then by the replicas they hold."""
    free_workers, assignment = list(workers), dict[int, int]()
    for considered in (slice(1), slice(None)):  # a worker's own part, then its replicas too
        for rank in (rank for rank in ranks if rank not in assignment):
            match = next((w for w in free_workers if needed_parts[rank] in held_parts[w][considered]), None)
            if match is not None:
                free_workers.remove(match)
                assignment[rank] = match
    return assignment | dict(zip((rank for rank in ranks if rank not in assignment), free_workers, strict=True))
