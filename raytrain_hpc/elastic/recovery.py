"""What a run goes on as when workers were lost, or came: which layout, which of them, from which step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.elastic.rank_assignment import staying
from raytrain_hpc.elastic.state_partition import State, newest_step, parts
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.planner.layout import Batching, Layout, model_ranks, resolve_batching, resolve_layout
from raytrain_hpc.planner.placement import Site, arranged, without_spares


@dataclass(frozen=True)
class Candidate:
    """A worker that is alive and can be given a rank.

    `held`: the states that it has in memory. `pace`: how many times as long as others it was seen to work for as much.
    `leaving`: its node is about to be taken away, so that it takes no part in what comes next. `rack`: its node's.
    """

    worker: int
    node: str
    pid: int
    held: tuple[State, ...] = ()
    pace: float = 1.0
    leaving: bool = False
    rack: str = ""

    @property
    def site(self) -> Site:
        """Where it is."""
        return Site(self.rack, self.node)


@dataclass(frozen=True)
class Formation:
    """The next generation: `members[r]` is the worker that gets rank r. `step`: the one that they hold in memory and go
    on from; None: the newest checkpoint."""

    layout: Layout
    members: tuple[int, ...]
    step: int | None


def least_workers(config: Config) -> int:
    """The fewest workers that a run goes on with."""
    least = config.cluster.min_workers
    return model_ranks(config) if least == AUTO else int(least)


def form(
    config: Config,
    batching: Batching,
    candidates: Sequence[Candidate],
    wanted: int,
    sent: Callable[[Layout, Batching], Mapping[str, float]] = lambda layout, batching: {},
) -> Formation | None:
    """The largest legal formation of at most `wanted` workers; None where there are too few for any.

    The batch stays cut as it is. Only data-parallel axes change: what cuts a model keeps its size, and a
    tensor-parallel group stays on one node. `sent`: bytes along each axis, by which ranks are placed. They go on from
    the newest step of which they hold all parts together, each where it was as far as that is as good.
    """
    candidates = [one for one in candidates if not one.leaving]
    for world in range(min(wanted, len(candidates)), least_workers(config) - 1, -1):
        layout = legal_layout(config, world, batching)
        members = None if layout is None else _members(candidates, world, config.parallel.tp)
        if layout is not None and members is not None:
            step, sites = newest_step(one.held for one in members), [one.site for one in members]
            held = [[state.part for state in one.held if state.step == step] for one in members]
            places = staying(arranged(layout, sites, sent(layout, batching)), sites, held, parts(layout))
            return Formation(layout, tuple(members[place].worker for place in places), step)
    return None


def legal_layout(config: Config, world: int, batching: Batching) -> Layout | None:
    """The layout of the settings on `world` workers; None where none is legal.

    Data-parallel axes that the settings fix are kept as long as they fit: first both, then the shards of a replica.
    """
    for freed in ((), ("dp_replicate",), ("dp_replicate", "dp_shard")):
        fitted = deepcopy(config)
        for axis in freed:
            if axis == "dp_replicate" or config.parallel.zero:
                setattr(fitted.parallel, axis, AUTO)
        try:
            layout = resolve_layout(fitted, world)
            resolve_batching(fitted, layout, batching)
        except LayoutError:
            continue
        return layout
    return None


def _members(candidates: Sequence[Candidate], world: int, together: int) -> list[Candidate] | None:
    """`world` of the candidates, in order of racks and nodes, groups of `together` on one node; None where too few fit.

    Those who hold state come first, and of a node's those who alone hold some.
    """
    nodes: dict[str, list[Candidate]] = {}
    holders = Counter(state for one in candidates for state in one.held)
    alone = {one.worker: sum(holders[state] == 1 for state in one.held) for one in candidates}
    for one in sorted(candidates, key=lambda one: (not one.held, -alone[one.worker], one.pid)):
        nodes.setdefault(one.node, []).append(one)
    held = {node: sum(bool(one.held) for one in there) for node, there in nodes.items()}
    everybody = {node: len(there) for node, there in nodes.items()}
    taken = _shares(held, everybody, world, together) if any(held.values()) else None
    taken = taken or without_spares(everybody, world, together)
    if taken is None:
        return None
    chosen = [one for node, count in taken.items() for one in nodes[node][:count]]
    return sorted(chosen, key=lambda one: (one.site, one.pid))


def _shares(held: Mapping[str, int], everybody: Mapping[str, int], world: int, together: int) -> dict[str, int] | None:
    """How many to take of each node: as many as possible of those who hold state."""
    taken = dict.fromkeys(everybody, 0)
    for available in (held, everybody):
        for node in sorted(taken, key=lambda node: (-available[node], node)):
            share = min(world - sum(taken.values()), available[node] // together * together - taken[node])
            taken[node] += max(0, share)
    return taken if sum(taken.values()) == world else None
