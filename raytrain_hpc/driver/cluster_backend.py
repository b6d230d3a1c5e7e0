"""Backend on a Ray cluster: connect, wait until it has room for the run, and create the worker group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import ray

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.autoscaler import AutoscalerRequest, find_resource
from raytrain_hpc.driver.capacity_view import CapacityView
from raytrain_hpc.driver.cluster_monitor import ClusterMonitor, read_snapshot
from raytrain_hpc.driver.cluster_room import find_room, wait_for_room
from raytrain_hpc.driver.ray_backend import RayWorkerGroup
from raytrain_hpc.driver.ray_cluster import connect_ray
from raytrain_hpc.driver.ray_topology import DEFAULT_CPU_WORKERS
from raytrain_hpc.driver.rendezvous_store import RendezvousStore
from raytrain_hpc.driver.worker_group import ActorPool
from raytrain_hpc.elastic.cluster_following import NodeCapacity
from raytrain_hpc.planner.layout import get_fixed_world_size, get_model_parallel_size
from raytrain_hpc.planner.topology import Topology


@dataclass
class RayBackend:
    """A Ray cluster for `world_size` workers, of which `start_count`, spares included, fit on it at the start.

    `ray_readers`: processes on it read training data for them. `monitor`: of a cluster that the run follows.
    `autoscaler`: of a cluster that was running.
    """

    world_size: int
    start_count: int
    cluster: Topology
    store: RendezvousStore
    ray_readers: bool
    uses_existing_cluster: bool
    monitor: ClusterMonitor | None = None
    autoscaler: AutoscalerRequest | None = None

    @property
    def follows_cluster(self) -> bool:
        """Whether the run has as many workers as the cluster has room for."""
        return self.monitor is not None

    def create_worker_group(self, config: Config) -> RayWorkerGroup:
        """Reserve slots for the workers and spares, and return their group."""
        nodes = None
        if self.monitor is not None:
            nodes = [NodeCapacity(node.node_id, 0, node.free) for node in self.monitor.snapshot.nodes]
        count = min(self.start_count, self.world_size + config.cluster.spares)
        pool = ActorPool(config, count, self.cluster, nodes=nodes)
        return RayWorkerGroup(
            config,
            pool,
            self.store,
            ray_readers=self.ray_readers,
            capacity=None if self.monitor is None else CapacityView(self.monitor, pool),
            request_nodes=None if self.autoscaler is None else self.autoscaler.ask,
        )


@contextmanager
def open_ray_backend(
    config: Config,
    print_line: Callable[[str], None] = lambda line: None,
    stop_event: threading.Event | None = None,
) -> Iterator[RayBackend]:
    """Connect to Ray, or start it, and yield the backend.

    Asks the autoscaler of a cluster that is too small for nodes, waits for them up to cluster.start_timeout or until
    `stop_event` is set, and prints what is missing; None: neither asks nor waits. Raises ClusterError if it stays too
    small, before anything is written.
    """
    # The store needs torch: import it while Ray and the workers start, which takes as long.
    threading.Thread(target=import_module, args=("torch",), daemon=True).start()
    num_workers = get_fixed_world_size(config) or max(DEFAULT_CPU_WORKERS, get_model_parallel_size(config))
    with connect_ray(config, num_workers + config.cluster.spares) as started, ExitStack() as stack:
        if stop_event is None:
            autoscaler, room = None, find_room(config, is_shared=not started)
        else:
            autoscaler = None if started else _open_autoscaler(config, stack)
            room = wait_for_room(config, is_shared=not started, print_line=print_line, stop_event=stop_event)
        monitor = ClusterMonitor(partial(read_snapshot, config)) if room.follows else None
        if monitor is not None:
            stack.callback(monitor.close)
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
            monitor=monitor,
            autoscaler=autoscaler,
        )


def _open_autoscaler(config: Config, stack: ExitStack) -> AutoscalerRequest:
    """Ask the autoscaler for what the run wants. The request is released with `stack`."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    autoscaler = AutoscalerRequest(config, find_resource(config, resources))
    stack.callback(autoscaler.release)
    autoscaler.ask()
    return autoscaler
