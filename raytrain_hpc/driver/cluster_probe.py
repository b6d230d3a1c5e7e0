"""Workers where a run would have them, asked what they see and how fast they reach one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from raytrain_hpc.config.schema import Config
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.driver.auto_layout import build_machine
from raytrain_hpc.driver.ray_backend import open_ray_backend
from raytrain_hpc.driver.ray_cluster import connect_ray
from raytrain_hpc.driver.ray_topology import DEFAULT_CPU_WORKERS, read_topology, resolve_world_size
from raytrain_hpc.driver.worker_group import ActorPool, Worker
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import get_fixed_world_size
from raytrain_hpc.planner.link_fit import CollectiveTimings
from raytrain_hpc.planner.topology import Topology

_TIMEOUT_S = 300.0


class ClusterProbe:
    """Workers that are up, and the store at which they meet."""

    def __init__(self, cluster: Topology, workers: Sequence[Worker], store: Any):
        self.cluster, self.workers = cluster, workers
        self._store, self._num_groups = store, 0

    def collect_host_info(self, path: str, marker: str) -> list[dict[str, Any]]:
        """What each worker says of its process and machine; see worker.facts."""
        asked = [worker.actor.facts.remote(path, marker) for worker in self.workers]
        found: list[dict[str, Any]] = ray.get(asked, timeout=_TIMEOUT_S)
        return [{**worker.info, **one} for worker, one in zip(self.workers, found, strict=True)]

    def measure_collectives(self, sizes: Sequence[int]) -> list[CollectiveTimings]:
        """Among the workers of the fullest node, one of each node, and all."""
        found = []
        for scope, members in group_workers_by_scope([worker.info["node"] for worker in self.workers]).items():
            chosen = [self.workers[member] for member in members]
            self._num_groups += 1
            meeting: Rendezvous = self._store.create_rendezvous(self._num_groups)
            asked = [
                worker.actor.collectives.remote(rank, len(chosen), meeting, list(sizes))
                for rank, worker in enumerate(chosen)
            ]
            nodes = len({worker.info["node"] for worker in chosen})
            found.append(CollectiveTimings(scope, len(chosen), nodes, ray.get(asked, timeout=_TIMEOUT_S)[0]))
        return found


def group_workers_by_scope(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Which workers to measure together, by name; `nodes[w]`: worker w's. Each set has two at least."""
    there: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        there.setdefault(node, []).append(number)
    found = {
        "inside a node": max(there.values(), key=len, default=[]),
        "across nodes": [members[0] for members in there.values()],
        "all": list(range(len(nodes))),
    }
    if len(there) == 1 or len(there) == len(nodes):
        del found["all"]  # the same as one of the others
    return {scope: members for scope, members in found.items() if len(members) > 1}


def inspect_running_cluster(config: Config) -> Machine:
    """The cluster that is running, or one started here, as plans see it: the devices that a run would take."""
    with connect_ray(config, get_fixed_world_size(config) or DEFAULT_CPU_WORKERS):
        cluster = read_topology(config)
        return build_machine(resolve_world_size(config, cluster), cluster)


@contextmanager
def open_cluster_probe(config: Config) -> Iterator[ClusterProbe]:
    """Workers of the cluster that a run with these settings would use, without a run."""
    with open_ray_backend(config) as fleet:
        cluster, store = fleet.topology_and_store
        actors = ActorPool(config, fleet.world, cluster)
        try:
            actors.start()
            yield ClusterProbe(
                cluster, sorted(actors.ready, key=lambda one: (one.info["node"], one.info["pid"])), store
            )
        finally:
            actors.close()
