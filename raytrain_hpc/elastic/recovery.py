"""Membership policy: members, layout and start step of the next generation, from the ready workers. Pure functions.

A generation is a set of workers with fixed ranks. A new one is formed at the start, after a failure, when part of the
state is in no memory, when workers join or leave or another number is wanted, and to rebalance slow ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.elastic.rank_assignment import assign_ranks
from raytrain_hpc.elastic.state_partition import StatePart, compute_state_partition, find_newest_complete_step
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.planner.layout import Batching, Layout, get_model_parallel_size, resolve_batching, resolve_layout
from raytrain_hpc.planner.placement import Site, place_ranks, select_active_workers


@dataclass(frozen=True)
class Candidate:
    """A ready worker. It is given no rank if `is_draining`: its node, or the driver's, is about to be removed.

    `worker_id`, `node_id`: identifiers within the run and of Ray. `state_parts`: parts of the training state in memory,
    its own before replicas, reported when its rank of the last generation ended; empty until then, and for a worker
    that was not a member of that generation. `slowdown`: time per microbatch relative to the median of the other ranks
    when it was last detected as slow, else 1. `rack`: "" if unknown. `has_local_files`: whether its node had files of
    local checkpoints when it started. `is_cold`: its first step has to compile, while the other ranks wait,
    or it does not answer as a spare.
    `node_parts`: parts that the agent of its node holds and no ready worker does.
    """

    worker_id: int
    node_id: str
    pid: int
    state_parts: tuple[StatePart, ...] = ()
    slowdown: float = 1.0
    is_draining: bool = False
    rack: str = ""
    has_local_files: bool = False
    is_cold: bool = False
    node_parts: tuple[StatePart, ...] = ()

    @property
    def reachable_parts(self) -> tuple[StatePart, ...]:
        """The parts that the worker has, or can open on its node."""
        return (*self.state_parts, *self.node_parts)

    @property
    def site(self) -> Site:
        """Rack and node of the worker."""
        return Site(self.rack, self.node_id)


@dataclass(frozen=True)
class Membership:
    """The members of the next generation: worker `members[r]` gets rank r.

    `step`: step to resume from, whose state the members hold in memory together; None: start from the newest
    checkpoint, or from initial weights. `config`: settings with the axes of the layout, if the planner has chosen them
    for this number of workers; None: those of the run.
    """

    layout: Layout
    members: tuple[int, ...]
    step: int | None
    config: Config | None = None


def get_min_workers(config: Config) -> int:
    """Return the fewest workers that may train: `cluster.min_workers`, or if auto one model replica (tp x cp x pp)."""
    min_workers = config.cluster.min_workers
    return get_model_parallel_size(config) if min_workers == AUTO else int(min_workers)


def find_legal_size(config: Config, batching: Batching, limit: int) -> int | None:
    """Return the largest number of workers up to `limit` on which a run with `batching` can train, or None.

    Only the data-parallel axes change size, as in `plan_membership`, and no size is below `get_min_workers`.
    """
    limit = min(limit, batching.count * get_model_parallel_size(config))  # every rank needs a microbatch
    for world_size in range(limit, get_min_workers(config) - 1, -1):
        if _find_legal_layout(config, world_size, batching) is not None:
            return world_size
    return None


def plan_membership(
    config: Config,
    batching: Batching,
    candidates: Sequence[Candidate],
    max_workers: int,
    estimate_bytes_by_axis: Callable[[Layout, Batching], Mapping[str, float]] = lambda layout, batching: {},
    choose_config: Callable[[int], Config | None] = lambda world_size: None,
) -> Membership | None:
    """Return the largest legal membership of at most `max_workers` workers; None if no size down to the minimum is.

    Call with all ready workers: before each generation, and while one runs to decide whether to end it. The batch keeps
    its microbatches. Axes are those of `choose_config(world_size)`, settings for this number of workers, if it knows
    some. Otherwise only the data-parallel axes change size; tensor-, context- and pipeline-parallel sizes are kept. A
    tensor-parallel group stays on one node.

    Cold workers become members only if the others are too few for any layout, or hold an older state: without them a
    run continues at once, on fewer workers, and they join when they are warm.

    The generation resumes from the newest step for which the members hold all state parts. Workers that hold state are
    preferred as members, but no set is searched that completes a step: `step` is None if theirs is incomplete. Ranks
    are placed by `estimate_bytes_by_axis(layout, batching)`, the bytes that a rank sends per step along each mesh axis
    ({}: mesh order). As far as that placement allows, workers get a rank whose part number they hold, which is the same
    state if the partition is unchanged.
    """
    candidates = [candidate for candidate in candidates if not candidate.is_draining]
    warm = [candidate for candidate in candidates if not candidate.is_cold]
    plan = partial(_plan_largest, config, batching, max_workers, estimate_bytes_by_axis, choose_config)
    plans = [plan(warm), plan(candidates) if len(warm) < len(candidates) else None]
    legal = [membership for membership in plans if membership is not None]
    return max(legal, key=lambda membership: -1 if membership.step is None else membership.step, default=None)


def _plan_largest(
    config: Config,
    batching: Batching,
    max_workers: int,
    estimate_bytes_by_axis: Callable[[Layout, Batching], Mapping[str, float]],
    choose_config: Callable[[int], Config | None],
    candidates: Sequence[Candidate],
) -> Membership | None:
    """Return the largest legal membership of these candidates, or None. Other arguments as of `plan_membership`."""
    for world_size in range(min(max_workers, len(candidates)), get_min_workers(config) - 1, -1):
        for chosen in (choose_config(world_size), None):
            layout = _find_legal_layout(chosen or config, world_size, batching)
            members = None if layout is None else _select_members(candidates, world_size, layout.tp)
            if layout is None or members is None:
                continue
            step, sites = find_newest_complete_step(m.reachable_parts for m in members), [m.site for m in members]
            held_parts = [[state.part for state in m.state_parts if state.step == step] for m in members]
            placement = assign_ranks(
                place_ranks(layout, sites, estimate_bytes_by_axis(layout, batching)),
                sites,
                held_parts,
                compute_state_partition(layout),
            )
            return Membership(layout, tuple(members[index].worker_id for index in placement), step, chosen)
    return None


def _find_legal_layout(config: Config, world_size: int, batching: Batching) -> Layout | None:
    """Return a layout of `world_size` ranks that is legal with `batching`, or None if there is none.

    Data-parallel sizes that the settings fix are kept if they give `world_size`. Otherwise `dp_replicate` counts as
    auto, then `dp_shard` as well (under ZeRO).
    """
    for freed_axes in ((), ("dp_replicate",), ("dp_replicate", "dp_shard")):
        relaxed = deepcopy(config)
        for axis in freed_axes:
            if axis == "dp_replicate" or config.parallel.zero:
                setattr(relaxed.parallel, axis, AUTO)
        try:
            layout = resolve_layout(relaxed, world_size)
            resolve_batching(relaxed, layout, batching)
        except LayoutError:
            continue
        return layout
    return None


def _select_members(candidates: Sequence[Candidate], world_size: int, group_size: int) -> list[Candidate] | None:
    """Select `world_size` candidates, sorted by rack, node and pid, or None if too few whole groups fit on nodes.

    Groups of `group_size` ranks (the tensor-parallel size) stay on one node. Nodes with most workers that can reach
    state come first; on a node, those that hold it themselves, and of them those that alone hold most parts of a step.
    If no state is in memory, those with files of local checkpoints count instead. If there are none either, whole nodes
    are left as spares if possible; see `select_active_workers`.
    """
    by_node: dict[str, list[Candidate]] = {}
    holder_counts = Counter(state for candidate in candidates for state in candidate.state_parts)
    sole_parts = {c.worker_id: sum(holder_counts[state] == 1 for state in c.state_parts) for c in candidates}
    has_state = any(candidate.reachable_parts for candidate in candidates)
    is_holder = {c.worker_id: bool(c.reachable_parts) if has_state else c.has_local_files for c in candidates}

    def rank_on_node(candidate: Candidate) -> tuple[bool, bool, int, int]:
        worker_id = candidate.worker_id
        return not candidate.state_parts, not is_holder[worker_id], -sole_parts[worker_id], candidate.pid

    for candidate in sorted(candidates, key=rank_on_node):
        by_node.setdefault(candidate.node_id, []).append(candidate)
    holders_per_node = {node: sum(is_holder[c.worker_id] for c in workers) for node, workers in by_node.items()}
    workers_per_node = {node: len(workers) for node, workers in by_node.items()}
    counts = (
        _count_members_per_node(holders_per_node, workers_per_node, world_size, group_size)
        if any(holders_per_node.values())
        else None
    )
    counts = counts or select_active_workers(workers_per_node, world_size, group_size)
    if counts is None:
        return None
    members = [candidate for node, count in counts.items() for candidate in by_node[node][:count]]
    return sorted(members, key=lambda c: (c.site, c.pid))


def _count_members_per_node(
    holders_per_node: Mapping[str, int], workers_per_node: Mapping[str, int], world_size: int, group_size: int
) -> dict[str, int] | None:
    """Return the number of members from each node: whole groups of state holders first, then any workers; or None."""
    counts = dict.fromkeys(workers_per_node, 0)
    for available in (holders_per_node, workers_per_node):
        for node in sorted(counts, key=lambda node: (-available[node], node)):
            count = min(world_size - sum(counts.values()), available[node] // group_size * group_size - counts[node])
            counts[node] += max(0, count)
    return counts if sum(counts.values()) == world_size else None
