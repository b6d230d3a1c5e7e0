"""Policy of a run that follows its cluster: how many workers it has, where, and when it grows. Pure functions.

With `cluster.workers=auto` on a cluster that the run has joined, devices of nodes that join are used. Workers start
there in the background; the run grows at a step boundary when they are ready. A lost or drained node needs no decision
here: the run continues on the workers that are left (elastic/recovery.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.elastic.recovery import get_min_workers

ARRIVAL_PATIENCE_S = 20.0  # the first of several new workers waits for the others, so that the run grows once


@dataclass(frozen=True)
class NodeCapacity:
    """A live node: `held` slots that the run has reserved, and `free` ones that it could reserve as well.

    No worker is started on a draining node: it is about to be removed.
    """

    node_id: str
    held: int
    free: int
    is_draining: bool = False


@dataclass(frozen=True)
class FollowRules:
    """Bounds of the number of workers (`maximum=None`: none), and the settings that decide about a change.

    `group_size`: workers that must share a node (the tensor-parallel size). `spares`: workers besides those that train.
    `interval_s`: seconds between two changes to more workers.
    """

    minimum: int
    maximum: int | None
    group_size: int = 1
    spares: int = 0
    interval_s: float = 0.0


def make_follow_rules(config: Config) -> FollowRules:
    """Return the rules of a config."""
    cluster = config.cluster
    return FollowRules(
        get_min_workers(config),
        get_max_workers(config),
        config.parallel.tp,
        cluster.spares,
        cluster.resize_interval,
    )


def get_max_workers(config: Config) -> int | None:
    """Return `cluster.max_workers`, or None if there is no bound."""
    max_workers = config.cluster.max_workers
    return None if max_workers in (AUTO, 0) else int(max_workers)


def count_usable_slots(nodes: Iterable[NodeCapacity], group_size: int) -> int:
    """Return how many workers fit on the nodes that stay, in whole groups of `group_size` per node."""
    return sum((node.held + node.free) // group_size * group_size for node in nodes if not node.is_draining)


def limit_capacity(nodes: Sequence[NodeCapacity], limit: int) -> tuple[NodeCapacity, ...]:
    """Return the nodes with at most `limit` slots, of those that stay: held ones first, on the nodes with most."""
    order = sorted((node for node in nodes if not node.is_draining), key=lambda n: (-n.held, -n.free, n.node_id))
    left, slots = limit, dict[str, list[int]]()
    for kind in ("held", "free"):
        for node in order:
            count = min(left, getattr(node, kind))
            slots.setdefault(node.node_id, []).append(count)
            left -= count
    return tuple(
        node if node.is_draining else NodeCapacity(node.node_id, slots[node.node_id][0], slots[node.node_id][1])
        for node in nodes
    )


def choose_target(
    nodes: Sequence[NodeCapacity],
    rules: FollowRules,
    find_legal_size: Callable[[int], int | None],
    requested: int | None = None,
    allowed: int | None = None,
) -> int:
    """Return the number of workers that the run should have, besides spares.

    It is `requested`, the number of an explicit resize, if there is one. Otherwise it is the largest legal number that
    fits on the nodes and within the bounds; the minimum if none does.

    Args:
        nodes: The live nodes of the cluster, with no more slots than the run may hold.
        rules: Bounds and settings.
        find_legal_size: Returns the largest number of workers up to a limit on which the run can train, or None.
        requested: Number of an explicit resize.
        allowed: Slots that the run may hold beside other runs, a bound of `requested`; None: any number.
    """
    if requested is not None:
        return requested if allowed is None else max(rules.minimum, min(requested, allowed - rules.spares))
    limit = count_usable_slots(nodes, rules.group_size) - rules.spares
    if rules.maximum is not None:
        limit = min(limit, rules.maximum)
    return max(rules.minimum, find_legal_size(limit) or 0)


def plan_reservations(nodes: Sequence[NodeCapacity], count: int, group_size: int) -> dict[str, int]:
    """Return how many more slots to reserve on each node, so that the run holds `count` on nodes that stay.

    Whole groups of `group_size` are completed on a node. The fullest nodes are used first, so that few nodes take part.
    """
    missing = count - sum(node.held for node in nodes if not node.is_draining)
    reservations: dict[str, int] = {}
    for node in sorted(nodes, key=lambda node: (-node.held - node.free, node.node_id)):
        if node.is_draining or missing <= 0:
            continue
        usable = (node.held + node.free) // group_size * group_size - node.held
        wanted = min(usable, missing)
        if wanted > 0:
            reservations[node.node_id] = wanted
            missing -= wanted
    return reservations


def is_growth_due(
    next_size: int,
    target: int,
    rules: FollowRules,
    *,
    since_arrival_s: float,
    since_growth_s: float,
    is_exempt: bool,
) -> bool:
    """Return whether to end the current generation for a larger one of `next_size` ranks.

    Args:
        next_size: Ranks of the next generation, more than now.
        target: Number of workers that the run should have.
        rules: Settings, of which `interval_s` bounds how often the run grows by itself.
        since_arrival_s: Seconds since the first of the additional workers was ready.
        since_growth_s: Seconds since the run last grew by itself; inf if it has not.
        is_exempt: The growth was requested, or replaces failed workers.
    """
    if is_exempt:
        return True
    is_complete = next_size >= target or since_arrival_s >= ARRIVAL_PATIENCE_S
    return is_complete and since_growth_s >= rules.interval_s
