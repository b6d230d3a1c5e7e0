"""Room of a Ray cluster for a run: how many workers it wants, how many fit now, and the wait until enough do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.ray_topology import follows_cluster, read_topology, resolve_world_size
from raytrain_hpc.driver.wait_report import report_wait
from raytrain_hpc.elastic.cluster_following import NodeCapacity, limit_capacity
from raytrain_hpc.elastic.device_allocation import UNLIMITED, Allowance
from raytrain_hpc.elastic.recovery import get_min_workers
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.placement import assign_workers_to_nodes
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.ray_private import get_free_resources

_POLL_INTERVAL_S = 0.5


@dataclass(frozen=True)
class ClusterRoom:
    """Nodes with the slots that the run may use, and numbers of workers on them.

    `world_size`: workers that the run wants, besides spares. `start_count`: workers, spares included, that fit now.
    `follows`: the run has as many workers as the cluster has room for.
    """

    topology: Topology
    world_size: int
    start_count: int
    follows: bool


def find_room(config: Config, *, is_shared: bool, allowance: Allowance = UNLIMITED) -> ClusterRoom:
    """Return the room of the cluster. `is_shared`: it was running before the run, and other jobs may use it.

    Raises ClusterError if fewer workers fit than the run may start with: all of them, or `cluster.min_workers` if set;
    also if its allowance beside other runs is less.
    """
    topology = read_topology(config)
    follows = is_shared and follows_cluster(config, topology.device)
    if follows:
        topology = _limit_to_free_slots(topology, allowance.devices)
    world, minimum = resolve_world_size(config, topology), get_min_workers(config)
    start_count = wanted = world + config.cluster.spares
    if allowance.devices is not None and allowance.devices < wanted:
        start_count = allowance.devices
        needed = wanted if config.cluster.min_workers == AUTO else minimum
        if start_count < needed:
            holder = allowance.holder or "another run"
            raise ClusterError(
                f"cluster.workers={config.cluster.workers}: this run may have {start_count} of {needed} "
                f"{topology.ray_resource} slots, {holder} has the others; wait for its end, add nodes or raise "
                "cluster.priority"
            )
    if follows and world < minimum:
        raise ClusterError(
            f"cluster.min_workers={minimum}: the cluster has {topology.total_slots} free {topology.ray_resource} slots "
            f"on {len(topology.nodes)} nodes; add nodes or lower it"
        )
    while True:
        try:
            assign_workers_to_nodes(start_count, topology, config.parallel.tp)
        except ClusterError:
            if config.cluster.min_workers == AUTO or start_count <= minimum:
                assign_workers_to_nodes(wanted, topology, config.parallel.tp)  # raises with the number that is wanted
                raise
            start_count -= 1
        else:
            return ClusterRoom(topology, world, start_count, follows)


def wait_for_room(
    config: Config,
    *,
    is_shared: bool,
    print_line: Callable[[str], None],
    stop_event: threading.Event,
    get_allowance: Callable[[], Allowance] = lambda: UNLIMITED,
) -> ClusterRoom:
    """Return the room of the cluster as soon as the run may start, with a line about what is missing until then.

    A Ray that was started for the run gets no further nodes and is not waited for. `get_allowance` returns what the run
    may have beside other runs. Raises ClusterError as `find_room` after cluster.start_timeout, or when `stop_event` is
    set.
    """
    deadline = time.monotonic() + config.cluster.start_timeout
    shortage = ""

    def try_find_room() -> ClusterRoom | None:
        nonlocal shortage
        try:
            return find_room(config, is_shared=is_shared, allowance=get_allowance())
        except ClusterError as error:
            if not is_shared or stop_event.is_set() or time.monotonic() > deadline:
                raise
            shortage = str(error).partition(";")[0]
            return None

    if (room := try_find_room()) is not None:
        return room
    with report_wait(print_line, lambda: f"nodes: {shortage}", config.cluster.start_timeout):
        while (room := try_find_room()) is None:
            stop_event.wait(_POLL_INTERVAL_S)
        return room


def _limit_to_free_slots(topology: Topology, allowed: int | None) -> Topology:
    """Return the topology without the slots that other jobs hold, and with at most `allowed` slots."""
    free = get_free_resources()
    nodes: Sequence[NodeCapacity] = [
        NodeCapacity(node.id, 0, min(node.slots, int(free.get(node.id, {}).get(topology.ray_resource, 0))))
        for node in topology.nodes
    ]
    nodes = nodes if allowed is None else limit_capacity(nodes, allowed)
    slots = {node.node_id: node.free for node in nodes if node.free}
    return replace(
        topology, nodes=tuple(replace(node, slots=slots[node.id]) for node in topology.nodes if node.id in slots)
    )
