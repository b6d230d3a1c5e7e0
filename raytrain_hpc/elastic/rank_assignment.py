"""Who keeps its place when a run goes on: state that stays where it is need not be sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from raytrain_hpc.planner.placement import Site


def assign_ranks(
    placement: Sequence[int], sites: Sequence[Site], held_parts: Sequence[Sequence[int]], needed_parts: Sequence[int]
) -> tuple[int, ...]:
    """The same places with as many workers as can be where the part of the state is needed that they hold.

    `placed[r]`: which worker gets rank r. `sites[w]` and `held[w]`: where a worker is, and the parts that it holds, its
    own before copies of others'. `needed[r]`: the part of rank r. Nodes of one rack that have as many ranks change all
    of these with one another, and the workers of a node theirs: that brings no two ranks nearer or further apart.
    """
    ranks_of: dict[Site, list[int]] = {}
    for rank, worker in enumerate(placement):
        ranks_of.setdefault(sites[worker], []).append(rank)
    if len(set(needed_parts)) == 1:  # everybody has all of it
        return tuple(placement)
    alike: dict[Hashable, list[Site]] = {}
    for site, ranks in ranks_of.items():
        alike.setdefault((site.rack, len(ranks)), []).append(site)
    found = list(placement)
    for group in alike.values():
        workers = {site: [placement[rank] for rank in ranks_of[site]] for site in group}
        for site, other in _match_nodes(group, workers, ranks_of, held_parts, needed_parts).items():
            for rank, worker in _assign_on_node(ranks_of[other], workers[site], held_parts, needed_parts).items():
                found[rank] = worker
    return tuple(found)


def _match_nodes(
    nodes: Sequence[Site],
    workers_by_node: dict[Site, list[int]],
    ranks_by_node: dict[Site, list[int]],
    held_parts: Sequence[Sequence[int]],
    needed_parts: Sequence[int],
) -> dict[Site, Site]:
    """Whose ranks each node gets: first those that find most of what they need there."""
    needing: dict[int, list[int]] = {}
    for number, site in enumerate(nodes):
        for part in {needed_parts[rank] for rank in ranks_by_node[site]}:
            needing.setdefault(part, []).append(number)
    common = []
    for number, site in enumerate(nodes):
        own = {part for worker in workers_by_node[site] for part in held_parts[worker][:1]}
        there = {part for worker in workers_by_node[site] for part in held_parts[worker]}
        counts = Counter(other for part in there for other in needing.get(part, ()))
        counts.update(
            other for part in own for other in needing.get(part, ())
        )  # twice: so that most stay who they were
        common += [(-count, number != other, number, other) for other, count in counts.items()]
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for _, _, number, other in sorted(common):
        if number not in chosen and other not in taken:
            chosen[number] = other
            taken.add(other)
    rest = iter(number for number in range(len(nodes)) if number not in taken)
    return {nodes[n]: nodes[chosen[n] if n in chosen else next(rest)] for n in range(len(nodes))}


def _assign_on_node(
    ranks: Sequence[int], workers: Sequence[int], held_parts: Sequence[Sequence[int]], needed_parts: Sequence[int]
) -> dict[int, int]:
    """Who of a node's workers gets which of these ranks."""
    left, seats = list(workers), dict[int, int]()
    for of_worker in (slice(1), slice(None)):  # what is its own, then copies
        for rank in (rank for rank in ranks if rank not in seats):
            fitting = next((worker for worker in left if needed_parts[rank] in held_parts[worker][of_worker]), None)
            if fitting is not None:
                left.remove(fitting)
                seats[rank] = fitting
    return seats | dict(zip((rank for rank in ranks if rank not in seats), left, strict=True))
