"""What a run goes on as when workers were lost, or came: which layout, which of them, from which step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.elastic.rank_assignment import assign_ranks
from raytrain_hpc.elastic.state_partition import StatePart, compute_state_partition, find_newest_complete_step
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.planner.layout import Batching, Layout, get_model_parallel_size, resolve_batching, resolve_layout
from raytrain_hpc.planner.placement import Site, place_ranks, select_active_workers


@dataclass(frozen=True)
class Candidate:
    """A worker that is alive and can be given a rank.

    `held`: the states that it has in memory. `pace`: how many times as long as others it was seen to work for as much.
    `leaving`: its node is about to be taken away, so that it takes no part in what comes next. `rack`: its node's.
    """

    worker: int
    node: str
    pid: int
    state_parts: tuple[StatePart, ...] = ()
    slowdown: float = 1.0
    is_draining: bool = False
    rack: str = ""

    @property
    def site(self) -> Site:
        """Where it is."""
        return Site(self.rack, self.node)


@dataclass(frozen=True)
class Membership:
    """The next generation: `members[r]` is the worker that gets rank r. `step`: the one that they hold in memory and go
    on from; None: the newest checkpoint."""

    layout: Layout
    members: tuple[int, ...]
    step: int | None


def get_min_workers(config: Config) -> int:
    """The fewest workers that a run goes on with."""
    least = config.cluster.min_workers
    return get_model_parallel_size(config) if least == AUTO else int(least)


def plan_membership(
    config: Config,
    batching: Batching,
    candidates: Sequence[Candidate],
    max_workers: int,
    estimate_bytes_by_axis: Callable[[Layout, Batching], Mapping[str, float]] = lambda layout, batching: {},
) -> Membership | None:
    """The largest legal formation of at most `wanted` workers; None where there are too few for any.

    The batch stays cut as it is. Only data-parallel axes change: what cuts a model keeps its size, and a
    tensor-parallel group stays on one node. `sent`: bytes along each axis, by which ranks are placed. They go on from
    the newest step of which they hold all parts together, each where it was as far as that is as good.
    """
    candidates = [one for one in candidates if not one.is_draining]
    for world in range(min(max_workers, len(candidates)), get_min_workers(config) - 1, -1):
        layout = find_legal_layout(config, world, batching)
        members = None if layout is None else _select_members(candidates, world, config.parallel.tp)
        if layout is not None and members is not None:
            step, sites = find_newest_complete_step(one.state_parts for one in members), [one.site for one in members]
            held = [[state.part for state in one.state_parts if state.step == step] for one in members]
            places = assign_ranks(
                place_ranks(layout, sites, estimate_bytes_by_axis(layout, batching)),
                sites,
                held,
                compute_state_partition(layout),
            )
            return Membership(layout, tuple(members[place].worker for place in places), step)
    return None


def find_legal_layout(config: Config, world_size: int, batching: Batching) -> Layout | None:
    """The layout of the settings on `world` workers; None where none is legal.

    Data-parallel axes that the settings fix are kept as long as they fit: first both, then the shards of a replica.
    """
    for freed in ((), ("dp_replicate",), ("dp_replicate", "dp_shard")):
        fitted = deepcopy(config)
        for axis in freed:
            if axis == "dp_replicate" or config.parallel.zero:
                setattr(fitted.parallel, axis, AUTO)
        try:
            layout = resolve_layout(fitted, world_size)
            resolve_batching(fitted, layout, batching)
        except LayoutError:
            continue
        return layout
    return None


def _select_members(candidates: Sequence[Candidate], world_size: int, group_size: int) -> list[Candidate] | None:
    """`world` of the candidates, in order of racks and nodes, groups of `together` on one node; None where too few fit.

    Those who hold state come first, and of a node's those who alone hold some.
    """
    nodes: dict[str, list[Candidate]] = {}
    holders = Counter(state for one in candidates for state in one.state_parts)
    alone = {one.worker: sum(holders[state] == 1 for state in one.state_parts) for one in candidates}
    for one in sorted(candidates, key=lambda one: (not one.state_parts, -alone[one.worker], one.pid)):
        nodes.setdefault(one.node, []).append(one)
    held = {node: sum(bool(one.state_parts) for one in there) for node, there in nodes.items()}
    everybody = {node: len(there) for node, there in nodes.items()}
    taken = _count_members_per_node(held, everybody, world_size, group_size) if any(held.values()) else None
    taken = taken or select_active_workers(everybody, world_size, group_size)
    if taken is None:
        return None
    chosen = [one for node, count in taken.items() for one in nodes[node][:count]]
    return sorted(chosen, key=lambda one: (one.site, one.pid))


def _count_members_per_node(
    holders_per_node: Mapping[str, int], workers_per_node: Mapping[str, int], world_size: int, group_size: int
) -> dict[str, int] | None:
    """How many to take of each node: as many as possible of those who hold state."""
    taken = dict.fromkeys(workers_per_node, 0)
    for available in (holders_per_node, workers_per_node):
        for node in sorted(taken, key=lambda node: (-available[node], node)):
            share = min(world_size - sum(taken.values()), available[node] // group_size * group_size - taken[node])
            taken[node] += max(0, share)
    return taken if sum(taken.values()) == world_size else None
