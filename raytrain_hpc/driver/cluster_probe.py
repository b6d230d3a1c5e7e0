"""Workers where a run would have them, asked what they see and how fast they reach one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from raytrain_hpc.config.schema import Config
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.driver.auto_layout import machine_of
from raytrain_hpc.driver.ray_backend import open_ray_fleet
from raytrain_hpc.driver.ray_cluster import connected
from raytrain_hpc.driver.ray_topology import CPU_WORKERS_BY_DEFAULT, topology, world_size
from raytrain_hpc.driver.worker_group import Actors, Worker
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import fixed_world
from raytrain_hpc.planner.link_fit import Reach
from raytrain_hpc.planner.topology import Topology

_PATIENCE_S = 300.0


class Probes:
    """Workers that are up, and the store at which they meet."""

    def __init__(self, cluster: Topology, workers: Sequence[Worker], store: Any):
        self.cluster, self.workers = cluster, workers
        self._store, self._meetings = store, 0

    def facts(self, path: str, mark: str) -> list[dict[str, Any]]:
        """What each worker says of its process and machine; see worker.facts."""
        asked = [worker.actor.facts.remote(path, mark) for worker in self.workers]
        found: list[dict[str, Any]] = ray.get(asked, timeout=_PATIENCE_S)
        return [{**worker.info, **one} for worker, one in zip(self.workers, found, strict=True)]

    def reach(self, sizes: Sequence[int]) -> list[Reach]:
        """Among the workers of the fullest node, one of each node, and all."""
        found = []
        for scope, members in scopes([worker.info["node"] for worker in self.workers]).items():
            chosen = [self.workers[member] for member in members]
            self._meetings += 1
            meeting: Rendezvous = self._store.meeting(self._meetings)
            asked = [
                worker.actor.collectives.remote(rank, len(chosen), meeting, list(sizes))
                for rank, worker in enumerate(chosen)
            ]
            nodes = len({worker.info["node"] for worker in chosen})
            found.append(Reach(scope, len(chosen), nodes, ray.get(asked, timeout=_PATIENCE_S)[0]))
        return found


def scopes(nodes: Sequence[str]) -> dict[str, list[int]]:
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


def running_machine(config: Config) -> Machine:
    """The cluster that is running, or one started here, as plans see it: the devices that a run would take."""
    with connected(config, fixed_world(config) or CPU_WORKERS_BY_DEFAULT):
        cluster = topology(config)
        return machine_of(world_size(config, cluster), cluster)


@contextmanager
def probes(config: Config) -> Iterator[Probes]:
    """Workers of the cluster that a run with these settings would use, without a run."""
    with open_ray_fleet(config) as fleet:
        cluster, store = fleet.placed
        actors = Actors(config, fleet.world, cluster)
        try:
            actors.start()
            yield Probes(cluster, sorted(actors.up, key=lambda one: (one.info["node"], one.info["pid"])), store)
        finally:
            actors.close()
