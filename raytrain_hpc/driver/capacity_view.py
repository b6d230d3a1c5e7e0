"""View of the cluster that a run follows: the nodes that Ray reports, the slots that it holds, and its allowance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from raytrain_hpc.driver.cluster_monitor import ClusterMonitor
from raytrain_hpc.driver.worker_group import ActorPool, Worker
from raytrain_hpc.elastic.cluster_following import NodeCapacity, limit_capacity
from raytrain_hpc.elastic.device_allocation import UNLIMITED, Allowance

_REPORT_DELAY_S = 3.0  # until Ray reports slots as taken that the run has reserved
_LOST_NODE_TTL_S = 60.0  # Ray lists a lost node as alive for 14 s; one that comes back is used after this time


class CapacityView:
    """Capacity of each live node for the run, from the newest snapshot of the monitor. Used by the driver's thread.

    `get_allowance` returns the slots that the run may hold beside other runs.
    """

    def __init__(
        self, monitor: ClusterMonitor, pool: ActorPool, get_allowance: Callable[[], Allowance] = lambda: UNLIMITED
    ):
        self._monitor, self._pool, self._get_allowance = monitor, pool, get_allowance
        self._excluded_until: dict[str, float] = {}  # node id -> monotonic seconds

    def update(self, members: Sequence[Worker] = ()) -> tuple[NodeCapacity, ...]:
        """Return the nodes with room for workers, within the allowance of the run. Does not block.

        Gives up slots on nodes that have left, and those beyond the allowance that none of `members` uses.
        """
        snapshot, now = self._monitor.snapshot, time.monotonic()
        allowed = self._get_allowance().devices
        if allowed is not None:
            self._pool.release_surplus(allowed, members)
        held, draining = self._pool.count_slots_by_node(), self._pool.drain_monitor.get_draining_nodes()
        excluded = {node for node, until in self._excluded_until.items() if now < until}
        alive = {node.node_id for node in snapshot.nodes}
        nodes = []
        for node in snapshot.nodes:
            if node.node_id in excluded:
                continue
            num_held = held.get(node.node_id, 0)
            is_outdated = snapshot.time < self._pool.get_reservation_time(node.node_id) + _REPORT_DELAY_S
            free = 0 if num_held and is_outdated else max(0, min(node.slots - num_held, node.free))
            nodes.append(NodeCapacity(node.node_id, num_held, free, node.node_id in draining))
        for node_id in held.keys() - alive:
            if self._pool.get_reservation_time(node_id) < snapshot.time:
                self._pool.leave_node(node_id)
        return tuple(nodes) if allowed is None else limit_capacity(nodes, allowed)

    def exclude_node(self, node_id: str) -> None:
        """Use no slot of a node that is lost or drained for the next minute."""
        self._excluded_until[node_id] = time.monotonic() + _LOST_NODE_TTL_S
