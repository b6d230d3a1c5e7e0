"""Which ranks hold the same part of the state, and who keeps a copy of what a lost node would take away."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.placement import Site


@dataclass(frozen=True, order=True)
class StatePart:
    """A state of some step in a worker's memory: one of `parts` into which it was cut in a generation."""

    generation: int
    part: int
    num_parts: int
    step: int


def compute_state_partition(layout: Layout) -> list[int]:
    """A number for each rank: ranks with the same one hold the same part of the state. Counted from 0."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(_get_part_key(layout, rank), len(numbers)) for rank in range(layout.world_size)]


def _get_part_key(layout: Layout, rank: int) -> Hashable:
    at = layout.get_coordinates(rank)
    experts = layout.get_expert_coordinates(rank)
    shares_experts = (experts["ep"], experts["dp_shard"]) if layout.ep > 1 else ()
    return at["pp"], at["tp"], at["dp_shard"], shares_experts


def plan_replication_pairs(layout: Layout, sites: Sequence[Site]) -> tuple[tuple[int, int], ...]:
    """(rank, the rank that keeps a copy of its state) pairs: one for each part that the loss of a node would take away.

    `sites[r]` is where rank r is. Where all are on one node, the loss of a process is what counts. Copies are spread
    evenly over the ranks of other nodes, on other racks where there are any, the next one first.
    """
    holders: dict[int, list[int]] = {}
    for rank, part in enumerate(compute_state_partition(layout)):
        holders.setdefault(part, []).append(rank)
    nodes, racks = [site.node for site in sites], [site.rack for site in sites]
    homes = nodes if len(set(nodes)) > 1 else [str(rank) for rank in range(len(sites))]
    apart = racks if len(set(racks)) > 1 else homes
    keepers, pairs = _ReplicaCounts(len(sites)), []
    for ranks in holders.values():
        source = ranks[0]
        if len({homes[rank] for rank in ranks}) == 1 and len(sites) > 1:
            pairs.append((source, keepers.assign_replica(source, apart)))
    return tuple(pairs)


class _ReplicaCounts:
    """Ranks by how many copies each keeps: of those with fewest, the next one is found without looking at all."""

    def __init__(self, world_size: int):
        self._ranks_by_count: list[list[int]] = [list(range(world_size))]  # each ascending

    def assign_replica(self, source: int, failure_domains: Sequence[str]) -> int:
        """The next rank around that is apart from the source and keeps fewest copies; it keeps one more now."""
        for count, ranks in enumerate(self._ranks_by_count):
            begin = bisect_right(ranks, source)
            for at in chain(range(begin, len(ranks)), range(begin)):
                if failure_domains[ranks[at]] != failure_domains[source]:
                    if count + 1 == len(self._ranks_by_count):
                        self._ranks_by_count.append([])
                    insort(self._ranks_by_count[count + 1], rank := ranks.pop(at))
                    return rank
        raise ValueError("nobody is apart from anybody")


def find_newest_complete_step(parts_by_worker: Iterable[Sequence[StatePart]]) -> int | None:
    """The newest step of which all parts are in the memory of these workers; None where there is none.

    Parts of two generations do not count together: they are cut otherwise.
    """
    found: dict[tuple[int, int], set[int]] = {}
    counts: dict[int, int] = {}
    for state in (one for of_worker in parts_by_worker for one in of_worker):
        found.setdefault((state.generation, state.step), set()).add(state.part)
        counts[state.generation] = state.num_parts
    whole = (step for (generation, step), there in found.items() if len(there) == counts[generation])
    return max(whole, default=None)
