"""Backend on a Ray cluster: connect, wait until it has room for the run, and create the worker group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module

import ray

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.capacity_view import CapacityView
from raytrain_hpc.driver.cluster_monitor import ClusterMonitor, SnapshotReader
from raytrain_hpc.driver.cluster_room import find_room, wait_for_room
from raytrain_hpc.driver.coordinator_client import CoordinatorClient
from raytrain_hpc.driver.ray_backend import RayWorkerGroup
from raytrain_hpc.driver.ray_cluster import block_sigterm, connect_ray
from raytrain_hpc.driver.ray_topology import DEFAULT_CPU_WORKERS
from raytrain_hpc.driver.rendezvous_store import RendezvousStore
from raytrain_hpc.driver.worker_group import ActorPool
from raytrain_hpc.elastic.cluster_following import NodeCapacity
from raytrain_hpc.planner.layout import get_fixed_world_size, get_model_parallel_size
from raytrain_hpc.planner.topology import Topology


@dataclass
class RayBackend:
    """A Ray cluster for `world_size` workers, of which `start_count`, spares included, fit on it at the start.

    `ray_readers`: processes on it read training data for them. `follows_cluster`: the run has as many workers as the
    cluster has room for. `monitor`: of a cluster that was running. `coordinator`: connects it to the other runs there.
    `stop_event`: ends the wait for slots and for the first workers.
    """

    world_size: int
    start_count: int
    cluster: Topology
    store: RendezvousStore
    ray_readers: bool
    uses_existing_cluster: bool
    follows_cluster: bool
    monitor: ClusterMonitor | None
    coordinator: CoordinatorClient
    stop_event: threading.Event | None = None

    def create_worker_group(self, config: Config) -> RayWorkerGroup:
        """Reserve slots for the workers and spares, and return their group."""
        nodes, monitor = None, self.monitor if self.follows_cluster else None
        if monitor is not None:
            nodes = [NodeCapacity(node.node_id, 0, node.free) for node in monitor.snapshot.nodes]
        count = min(self.start_count, self.world_size + config.cluster.spares)
        pool = ActorPool(config, count, self.cluster, nodes=nodes, stop_event=self.stop_event)
        self.coordinator.begin(config, pool.count_slots)
        return RayWorkerGroup(
            config,
            pool,
            self.store,
            ray_readers=self.ray_readers,
            capacity=None if monitor is None else CapacityView(monitor, pool, self.coordinator.get_allowance),
            coordinator=self.coordinator,
        )


@contextmanager
def open_ray_backend(
    config: Config,
    print_line: Callable[[str], None] = lambda line: None,
    stop_event: threading.Event | None = None,
    print_notice: Callable[[str], None] = lambda text: None,
) -> Iterator[RayBackend]:
    """Connect to Ray, or start it, and yield the backend.

    Asks the autoscaler of a cluster that is too small for nodes, waits for them up to cluster.start_timeout or until
    `stop_event` is set, and prints what is missing; None: neither asks nor waits. Raises ClusterError if it stays too
    small, before anything is written. `print_notice`: see `connect_ray`.
    """
    # The store needs torch: import it while Ray and the workers start, which takes as long.
    with block_sigterm():  # or this thread would receive it in the place of the main thread, while Ray's handler is set
        threading.Thread(target=import_module, args=("torch",), daemon=True).start()
    num_workers = get_fixed_world_size(config) or max(DEFAULT_CPU_WORKERS, get_model_parallel_size(config))
    with connect_ray(config, num_workers + config.cluster.spares, print_notice) as started, ExitStack() as stack:
        monitor, coordinator = None, CoordinatorClient(config)
        if stop_event is None:
            room = find_room(config, is_shared=not started)
        elif started:
            room = wait_for_room(config, is_shared=False, print_line=print_line, stop_event=stop_event)
        else:
            monitor = _join_runs(config, coordinator, stack)
            room = wait_for_room(
                config,
                is_shared=True,
                print_line=print_line,
                stop_event=stop_event,
                get_allowance=coordinator.get_allowance,
            )
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        store = RendezvousStore(host, config)
        # A Ray that was started for this run has no CPUs besides those of the workers.
        readers = config.data.engine == "ray" or (config.data.engine == AUTO and not started)
        yield RayBackend(
            room.world_size,
            room.start_count,
            room.topology,
            store,
            readers,
            uses_existing_cluster=not started,
            follows_cluster=room.follows,
            monitor=monitor,
            coordinator=coordinator,
            stop_event=stop_event,
        )


def _join_runs(config: Config, coordinator: CoordinatorClient, stack: ExitStack) -> ClusterMonitor:
    """Report to the coordinator of the runs on the cluster until `stack` is closed; wait for the first allowance."""
    stack.callback(coordinator.leave)
    monitor = ClusterMonitor(SnapshotReader(config), coordinator.report)
    stack.callback(monitor.close)
    coordinator.wait_until_known()
    return monitor
