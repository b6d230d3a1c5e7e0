"""State partition: which ranks hold the same part of the training state, and which ranks keep replicas of a part."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.placement import Site


@dataclass(frozen=True, order=True)
class StatePart:
    """A part of the training state after `step` that a worker holds in memory.

    `part` is one of the `num_parts` parts of the state partition of `generation`.
    """

    generation: int
    part: int
    num_parts: int
    step: int


def compute_state_partition(layout: Layout) -> list[int]:
    """Return the state part that each rank holds, numbered from 0. Ranks with the same number hold the same state."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(_get_part_key(layout, rank), len(numbers)) for rank in range(layout.world_size)]


def _get_part_key(layout: Layout, rank: int) -> Hashable:
    coordinates = layout.get_coordinates(rank)
    experts = layout.get_expert_coordinates(rank)
    expert_key = (experts["ep"], experts["dp_shard"]) if layout.ep > 1 else ()
    return coordinates["pp"], coordinates["tp"], coordinates["dp_shard"], expert_key


def plan_replication_pairs(layout: Layout, sites: Sequence[Site]) -> tuple[tuple[int, int], ...]:
    """Return (source rank, rank that keeps a replica) for each state part that the loss of one node would destroy.

    `sites[r]`: rack and node of rank r. If all ranks are on one node, replicas protect against the loss of a process.
    Replicas go to another rack if there are several, else to another node. They are spread evenly over the ranks;
    among ranks with equally few replicas the next higher rank is preferred, wrapping around.
    """
    holders: dict[int, list[int]] = {}
    for rank, part in enumerate(compute_state_partition(layout)):
        holders.setdefault(part, []).append(rank)
    nodes, racks = [site.node for site in sites], [site.rack for site in sites]
    lost_together = nodes if len(set(nodes)) > 1 else [str(rank) for rank in range(len(sites))]
    failure_domains = racks if len(set(racks)) > 1 else lost_together
    replica_counts, pairs = _ReplicaCounts(len(sites)), []
    for ranks in holders.values():
        source = ranks[0]
        if len({lost_together[rank] for rank in ranks}) == 1 and len(sites) > 1:
            pairs.append((source, replica_counts.assign_replica(source, failure_domains)))
    return tuple(pairs)


class _ReplicaCounts:
    """Ranks grouped by the number of replicas they keep, to find the next rank without a scan over all ranks."""

    def __init__(self, world_size: int):
        self._ranks_by_count: list[list[int]] = [list(range(world_size))]  # each ascending

    def assign_replica(self, source: int, failure_domains: Sequence[str]) -> int:
        """Return the rank to keep a replica of `source` and count the replica.

        Raises ValueError if all ranks are in the failure domain of `source`.
        """
        for count, ranks in enumerate(self._ranks_by_count):
            begin = bisect_right(ranks, source)
            for index in chain(range(begin, len(ranks)), range(begin)):
                if failure_domains[ranks[index]] != failure_domains[source]:
                    if count + 1 == len(self._ranks_by_count):
                        self._ranks_by_count.append([])
                    insort(self._ranks_by_count[count + 1], rank := ranks.pop(index))
                    return rank
        raise ValueError(f"no other node or process can hold a replica of rank {source}'s state")


def find_complete_generation(step: int, parts_by_holder: Iterable[Sequence[StatePart]]) -> int | None:
    """Return the newest generation of which all parts of the state after `step` are held, or None."""
    complete = _find_complete_states(parts_by_holder)
    return max((generation for generation, complete_step in complete if complete_step == step), default=None)


def assign_missing_parts(
    generation: int, step: int, own_parts: Sequence[Sequence[StatePart]], node_parts: Sequence[Sequence[StatePart]]
) -> list[list[StatePart]]:
    """Return which parts of a generation's state after `step` each member has to open on its node.

    `own_parts[r]`, `node_parts[r]`: in the memory of member r, and held by its node. Only parts that no member has
    itself are opened, each by one member, evenly.
    """
    assigned: list[list[StatePart]] = [[] for _ in own_parts]
    own = {part for parts in own_parts for part in parts}
    nearby = {part for parts in node_parts for part in parts if (part.generation, part.step) == (generation, step)}
    for missing in sorted(nearby - own):
        holders = [member for member, parts in enumerate(node_parts) if missing in parts]
        assigned[min(holders, key=lambda member: len(assigned[member]))].append(missing)
    return assigned


def find_newest_complete_step(parts_by_holder: Iterable[Sequence[StatePart]]) -> int | None:
    """Return the newest step for which these holders together have all parts of the state, or None.

    Parts of different generations are never combined, because each generation has its own partition.
    """
    return max((step for _, step in _find_complete_states(parts_by_holder)), default=None)


def _find_complete_states(parts_by_holder: Iterable[Sequence[StatePart]]) -> list[tuple[int, int]]:
    """Return the generations and steps of which all parts are held."""
    parts_held: dict[tuple[int, int], set[int]] = {}
    num_parts: dict[int, int] = {}
    for state_part in chain.from_iterable(parts_by_holder):
        parts_held.setdefault((state_part.generation, state_part.step), set()).add(state_part.part)
        num_parts[state_part.generation] = state_part.num_parts
    return [
        (generation, step) for (generation, step), parts in parts_held.items() if len(parts) == num_parts[generation]
    ]
