"""Monitor of a cluster that was running before the run: which nodes are up, and how many of their slots are free."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ray.exceptions import RayError

from raytrain_hpc.config.schema import Config
from raytrain_hpc.device_backends import get_ray_resource
from raytrain_hpc.driver.ray_topology import follows_cluster, read_topology, resolve_world_size
from raytrain_hpc.driver.throttle import Throttle
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.layout import get_fixed_world_size
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.ray_private import get_free_resources

_log = logging.getLogger(__name__)
_POLL_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class NodeSlots:
    """A live node with its slots, and how many of them Ray reports as free."""

    node_id: str
    slots: int
    free: int


@dataclass(frozen=True)
class ClusterSnapshot:
    """The live nodes as of `time` (monotonic seconds), whose slots are units of `resource`, such as GPU or CPU.

    `fixed_workers`: those that the run wants on any cluster; None: as many as there is room for.
    """

    nodes: tuple[NodeSlots, ...]
    time: float
    resource: str = "CPU"
    fixed_workers: int | None = None


class SnapshotReader:
    """Reader of the live nodes from Ray. A run keeps the type of its devices, whatever joins later."""

    def __init__(self, config: Config):
        self._config, self._device = config, ""

    def __call__(self) -> ClusterSnapshot:
        """Read the live nodes. Nodes without slots are left out: all of them if the run needs GPUs of none."""
        config, now = self._config, time.monotonic()  # what is reserved after this moment may be missing
        try:
            topology, free = read_topology(config, self._device), get_free_resources()
        except ClusterError:  # no node has a GPU, yet or any more
            resource = get_ray_resource(self._device or config.cluster.device)
            return ClusterSnapshot((), now, resource, get_fixed_world_size(config))
        if topology.has_accelerators:
            self._device = topology.device
        num_fixed = None if follows_cluster(config, topology.device) else resolve_world_size(config, topology)
        return ClusterSnapshot(tuple(_list_slots(topology, free)), now, topology.ray_resource, num_fixed)


def _list_slots(topology: Topology, free: dict[str, dict[str, float]]) -> list[NodeSlots]:
    resource = topology.ray_resource
    return [
        NodeSlots(node.id, node.slots, min(node.slots, int(free.get(node.id, {}).get(resource, 0))))
        for node in topology.nodes
    ]


class ClusterMonitor:
    """Reader of the cluster's state in a thread, so that the driver never waits for Ray's answer.

    It takes at most a tenth of the thread's time. While Ray's head does not answer, the last snapshot stays.
    """

    def __init__(
        self, read: Callable[[], ClusterSnapshot], report: Callable[[ClusterSnapshot], None] = lambda snapshot: None
    ):
        """Take a first snapshot with `read`, and start the thread. Raises what `read` raises.

        `report`: called with the newest snapshot, the first time before this returns, then a few times a second.
        """
        self._read, self._report, self._snapshot = read, report, read()
        report(self._snapshot)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()

    @property
    def snapshot(self) -> ClusterSnapshot:
        """The newest snapshot."""
        return self._snapshot

    def close(self) -> None:
        """Stop the thread. Call before Ray is disconnected. If Ray's head does not answer, do not wait for long."""
        self._closed.set()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        throttle = Throttle(_POLL_INTERVAL_S)
        while not self._closed.wait(_POLL_INTERVAL_S / 2):
            if throttle.is_ready():
                with throttle.measure():
                    try:
                        self._snapshot = self._read()
                    except (RayError, RuntimeError, OSError) as error:
                        _log.warning("the state of the Ray cluster cannot be read: %s", error)
            self._report(self._snapshot)
