"""Which ranks hold the same part of the state, and who keeps a copy of what a lost node would take away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from raytrain_hpc.plan.layout import Layout


def parts(layout: Layout) -> list[int]:
    """A number for each rank: ranks with the same one hold the same part of the state. Counted from 0."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(_place(layout, rank), len(numbers)) for rank in range(layout.world)]


def _place(layout: Layout, rank: int) -> Hashable:
    at = layout.coordinates(rank)
    experts = layout.place_of_experts(rank)
    shares_experts = (experts["ep"], experts["dp_shard"]) if layout.ep > 1 else ()
    return at["pp"], at["tp"], at["dp_shard"], shares_experts


def buddies(layout: Layout, nodes: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(rank, the rank that keeps a copy of its state) pairs: one for each part that the loss of a node would take away.

    `nodes[r]` is the node of rank r. Where all are on one node, the loss of a process is what counts. Copies are spread
    evenly over the ranks of other nodes, the next one first.
    """
    holders: dict[int, list[int]] = {}
    for rank, part in enumerate(parts(layout)):
        holders.setdefault(part, []).append(rank)
    homes = list(nodes) if len(set(nodes)) > 1 else [str(rank) for rank in range(layout.world)]
    kept: Counter[int] = Counter()
    pairs = []
    for ranks in holders.values():
        source = ranks[0]
        if len({homes[rank] for rank in ranks}) == 1 and layout.world > 1:
            elsewhere = [rank for rank in range(layout.world) if homes[rank] != homes[source]]
            buddy = min(elsewhere, key=lambda rank: (kept[rank], (rank - source) % layout.world))
            kept[buddy] += 1
            pairs.append((source, buddy))
    return tuple(pairs)


def newest_step(held: Sequence[Sequence[tuple[int, int]]], count: int) -> int | None:
    """The newest step of which all `count` parts are held; None where there is none.

    `held`: for each worker the (part, step) pairs that it has in memory.
    """
    found: dict[int, set[int]] = {}
    for part, step in (one for of_worker in held for one in of_worker):
        found.setdefault(step, set()).add(part)
    return max((step for step, there in found.items() if len(there) == count), default=None)
