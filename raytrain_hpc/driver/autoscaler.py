"""Request to Ray's autoscaler for the nodes that a run wants, held while the run lasts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from ray.exceptions import RayError

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.ray_topology import is_sized_by_cpus
from raytrain_hpc.elastic.cluster_following import get_max_workers
from raytrain_hpc.elastic.recovery import get_min_workers
from raytrain_hpc.planner.layout import get_fixed_world_size

_log = logging.getLogger(__name__)
_RELEASE_TIMEOUT_S = 10.0  # for a request that is being sent
Bundle = dict[str, float]  # resource -> amount, which must fit on one node


def count_wanted_workers(config: Config, target: int = 0) -> int:
    """Return the workers that a run wants nodes for, besides spares.

    `target`: the number that it should have now; 0 before it starts. A run whose settings fix no number wants at least
    `cluster.max_workers`; without a bound, `cluster.min_workers`.
    """
    fixed_size = get_fixed_world_size(config)
    if fixed_size is not None:
        return target or fixed_size
    return max(target, get_max_workers(config) or get_min_workers(config))


def list_bundles(config: Config, resource: str, workers: int) -> list[Bundle]:
    """Return the resources of `workers` workers: a bundle per tensor-parallel group, which shares a node.

    `resource`: "GPU" or "CPU".
    """
    unit = 1
    if resource == "CPU" and is_sized_by_cpus(config) and config.cluster.cpus_per_worker != AUTO:
        unit = int(config.cluster.cpus_per_worker)
    tp = config.parallel.tp
    return [{resource: float(unit * tp)} for _ in range(-(-workers // tp))]


def find_resource(config: Config, cluster_resources: Mapping[str, float]) -> str:
    """Return the resource that a worker takes, "GPU" or "CPU", of a cluster with these resources."""
    if config.cluster.device == AUTO:
        return "GPU" if cluster_resources.get("GPU") else "CPU"
    return "GPU" if config.cluster.device == "cuda" else "CPU"


def send_request(bundles: Sequence[Bundle]) -> None:
    """Ask the autoscaler of the connected cluster for room for these bundles; it replaces the last request.

    A cluster without autoscaler ignores it.
    """
    from ray.autoscaler.sdk import request_resources  # a slow import that only runs on a shared cluster need

    request_resources(bundles=list(bundles))


class AutoscalerRequest:
    """The request of a run. Ray keeps one per cluster, until it is replaced or released.

    It is sent in a thread, since Ray's head may not answer.
    """

    def __init__(self, config: Config, resource: str, send: Callable[[Sequence[Bundle]], None] = send_request):
        self._config, self._resource, self._send = config, resource, send
        self._num_workers = 0
        self._thread: threading.Thread | None = None  # of the last request
        self._lock = threading.Lock()  # requests arrive in the order in which they were made

    def ask(self, target: int = 0) -> None:
        """Ask for nodes for the workers that the run wants and its spares, if their number has changed; return at once.

        `target`: as of `count_wanted_workers`.
        """
        workers = count_wanted_workers(self._config, target) + self._config.cluster.spares
        if workers != self._num_workers:
            self._num_workers = workers
            self._thread = threading.Thread(target=self._update, name="autoscaler", daemon=True)
            self._thread.start()

    def release(self) -> None:
        """Withdraw the request, so that the autoscaler may remove nodes that are idle. Call when the run ends.

        Waits for a request that is being sent, since Ray is disconnected afterwards.
        """
        if self._num_workers:
            self._num_workers = 0
            if self._thread is not None:
                self._thread.join(_RELEASE_TIMEOUT_S)
            self._update()

    def _update(self) -> None:
        with self._lock:
            try:
                self._send(list_bundles(self._config, self._resource, self._num_workers))
            except (RayError, RuntimeError, OSError) as error:
                _log.warning("the request for %d workers did not reach Ray's autoscaler: %s", self._num_workers, error)
