"""Which ranks hold the same part of the state, and who keeps a copy of what a lost node would take away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from raytrain_hpc.plan.layout import Layout
from raytrain_hpc.plan.placement import Site


@dataclass(frozen=True, order=True)
class State:
    """A state of some step in a worker's memory: one of `parts` into which it was cut in a generation."""

    generation: int
    part: int
    parts: int
    step: int


def parts(layout: Layout) -> list[int]:
    """A number for each rank: ranks with the same one hold the same part of the state. Counted from 0."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(_place(layout, rank), len(numbers)) for rank in range(layout.world)]


def _place(layout: Layout, rank: int) -> Hashable:
    at = layout.coordinates(rank)
    experts = layout.place_of_experts(rank)
    shares_experts = (experts["ep"], experts["dp_shard"]) if layout.ep > 1 else ()
    return at["pp"], at["tp"], at["dp_shard"], shares_experts


def buddies(layout: Layout, sites: Sequence[Site]) -> tuple[tuple[int, int], ...]:
    """(rank, the rank that keeps a copy of its state) pairs: one for each part that the loss of a node would take away.

    `sites[r]` is where rank r is. Where all are on one node, the loss of a process is what counts. Copies are spread
    evenly over the ranks of other nodes, on other racks where there are any, the next one first.
    """
    holders: dict[int, list[int]] = {}
    for rank, part in enumerate(parts(layout)):
        holders.setdefault(part, []).append(rank)
    nodes = [site.node for site in sites]
    homes = nodes if len(set(nodes)) > 1 else [str(rank) for rank in range(layout.world)]
    kept: Counter[int] = Counter()
    pairs = []
    for ranks in holders.values():
        source = ranks[0]
        if len({homes[rank] for rank in ranks}) == 1 and layout.world > 1:
            elsewhere = [rank for rank in range(layout.world) if homes[rank] != homes[source]]
            rack = sites[source].rack
            buddy = min(
                elsewhere, key=lambda rank: (sites[rank].rack == rack, kept[rank], (rank - source) % layout.world)
            )
            kept[buddy] += 1
            pairs.append((source, buddy))
    return tuple(pairs)


def newest_step(held: Iterable[Sequence[State]]) -> int | None:
    """The newest step of which all parts are in the memory of these workers; None where there is none.

    Parts of two generations do not count together: they are cut otherwise.
    """
    found: dict[tuple[int, int], set[int]] = {}
    counts: dict[int, int] = {}
    for state in (one for of_worker in held for one in of_worker):
        found.setdefault((state.generation, state.step), set()).add(state.part)
        counts[state.generation] = state.parts
    whole = (step for (generation, step), there in found.items() if len(there) == counts[generation])
    return max(whole, default=None)
