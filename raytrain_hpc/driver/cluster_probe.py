"""Workers started on a cluster without a run, to collect facts about their hosts and to measure collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from raytrain_hpc.config.schema import Config
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.driver.auto_layout import build_machine
from raytrain_hpc.driver.cluster_backend import open_ray_backend
from raytrain_hpc.driver.ray_cluster import connect_ray
from raytrain_hpc.driver.ray_topology import DEFAULT_CPU_WORKERS, read_topology, resolve_world_size
from raytrain_hpc.driver.worker_group import ActorPool, Worker
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import get_fixed_world_size
from raytrain_hpc.planner.link_fit import CollectiveTimings
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.ray_address import check_address

_TIMEOUT_S = 300.0


class ClusterProbe:
    """Started workers of a cluster, and the store through which they form process groups."""

    def __init__(self, cluster: Topology, workers: Sequence[Worker], store: Any):
        self.cluster, self.workers = cluster, workers
        self._store, self._num_groups = store, 0

    def collect_host_info(self, path: str, marker: str) -> list[dict[str, Any]]:
        """Return placement and host facts of each worker; see `worker.host_info`. `socket_path`: of Ray on its node."""
        store = self._store.create_rendezvous(0)
        driver = (store.host, store.port)
        replies = [worker.actor.collect_host_info.remote(path, marker, driver) for worker in self.workers]
        host_infos: list[dict[str, Any]] = ray.get(replies, timeout=_TIMEOUT_S)
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        sockets = {node["NodeID"]: node["ObjectStoreSocketName"] for node in nodes}
        return [
            {**worker.info, **host_info, "socket_path": sockets[worker.info["node_id"]]}
            for worker, host_info in zip(self.workers, host_infos, strict=True)
        ]

    def measure_collectives(self, sizes: Sequence[int]) -> list[CollectiveTimings]:
        """Measure collectives inside the fullest node, across nodes, and among all workers. `sizes` are in bytes."""
        timings = []
        for scope, members in group_workers_by_scope([worker.info["node_id"] for worker in self.workers]).items():
            workers = [self.workers[index] for index in members]
            self._num_groups += 1
            rendezvous: Rendezvous = self._store.create_rendezvous(self._num_groups)
            replies = [
                worker.actor.measure_collectives.remote(rank, len(workers), rendezvous, list(sizes))
                for rank, worker in enumerate(workers)
            ]
            num_nodes = len({worker.info["node_id"] for worker in workers})
            timings.append(CollectiveTimings(scope, len(workers), num_nodes, ray.get(replies, timeout=_TIMEOUT_S)[0]))
        return timings


def group_workers_by_scope(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Return named sets of workers to measure together, each of at least two. `nodes[w]` is the node of worker w."""
    workers_by_node: dict[str, list[int]] = {}
    for worker, node in enumerate(nodes):
        workers_by_node.setdefault(node, []).append(worker)
    scopes = {
        "inside a node": max(workers_by_node.values(), key=len, default=[]),
        "across nodes": [members[0] for members in workers_by_node.values()],
        "all": list(range(len(nodes))),
    }
    if len(workers_by_node) == 1 or len(workers_by_node) == len(nodes):
        del scopes["all"]  # equal to one of the other sets
    return {scope: members for scope, members in scopes.items() if len(members) > 1}


def inspect_running_cluster(config: Config) -> Machine:
    """Return the devices that a run with `config` would use, as a machine of the planner.

    Raises ClusterError if no cluster is running, or if it cannot be reached. None is started.
    """
    _check_address(config)
    with connect_ray(config, get_fixed_world_size(config) or DEFAULT_CPU_WORKERS, may_start=False):
        cluster = read_topology(config)
        return build_machine(resolve_world_size(config, cluster), cluster)


def _check_address(config: Config) -> None:
    """Raise ClusterError if something else than Ray answers at cluster.address, unless Ray is connected already."""
    if not ray.is_initialized():
        check_address(config)


@contextmanager
def open_cluster_probe(config: Config) -> Iterator[ClusterProbe]:
    """Yield a probe with the workers that a run with `config` would use. No run is started.

    Raises ClusterError if Ray cannot be reached or started, or has too few slots.
    """
    _check_address(config)
    with open_ray_backend(config) as backend:
        cluster, store = backend.cluster, backend.store
        pool = ActorPool(config, backend.world_size, cluster)
        try:
            pool.start()
            yield ClusterProbe(cluster, sorted(pool.ready, key=lambda w: (w.info["node_id"], w.info["pid"])), store)
        finally:
            pool.close()
