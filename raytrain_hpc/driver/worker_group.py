"""The Ray actors of a run: their slots in placement groups, their start, and the replacement of failed ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.dataset_store import DatasetStore
from raytrain_hpc.driver.node_names import NodeNames
from raytrain_hpc.driver.ray_messages import describe_actor_death
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.errors import ClusterError, RaytrainError
from raytrain_hpc.planner.placement import assign_workers_to_nodes
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.worker.actor import WorkerActor

_log = logging.getLogger(__name__)
_MAX_START_ATTEMPTS = 3  # consecutive failures to start a replacement, after which no more are started
_REPLACEMENT_DELAY_S = 1.0  # a start takes a CPU for seconds: let the surviving ranks resume first

WorkerInfo = dict[str, Any]


Slot = tuple[PlacementGroup, int]  # placement group, index of the bundle


@dataclass(eq=False)
class Worker:
    """One actor, with host and device facts once it is ready, and the states it held after its last generation.

    `info["node_id"]` is Ray's identifier of its node, `info["node"]` the node's name for messages and records.
    """

    worker_id: int
    actor: Any
    slot: Slot
    description_ref: Any
    info: WorkerInfo = field(default_factory=dict)
    states: tuple[StatePart, ...] = ()
    slowdown: float = 1.0  # time for the same work, relative to the other ranks


class ActorPool:
    """One actor per slot, in bundles that each fit on a node. A failed actor is replaced in its slot."""

    def __init__(self, config: Config, count: int, cluster: Topology, actor_class: Any = WorkerActor):
        """Reserve `count` slots on `cluster`. Raises ClusterError if they are not free within cluster.start_timeout.

        `actor_class`: a Ray actor with the interface of WorkerActor.
        """
        self._starting: list[Worker] = []
        self._vacant_slots: list[tuple[float, Slot]] = []  # (vacant since, slot)
        self.ready: list[Worker] = []
        self._num_started, self._failed_starts, self._is_started = 0, 0, False
        self._config, self._cluster, self._actor_class = config, cluster, actor_class
        self._node_names = NodeNames(cluster)
        self._warmup_spec: WorkerSpec | None = None  # for the warm-up of actors that start during a run
        self._dataset_store = DatasetStore()
        self._placement_groups: list[PlacementGroup] = []
        workers_by_node = assign_workers_to_nodes(count, cluster, config.parallel.tp)
        # Name the nodes only if racks matter; otherwise Ray chooses those that are free.
        self._slots = self._reserve(list(workers_by_node.values()), list(workers_by_node) if cluster.has_racks else ())
        if not self._placement_groups[0].wait(config.cluster.start_timeout):
            self.close()
            raise ClusterError(
                f"cluster.start_timeout={config.cluster.start_timeout:g}: {count} free {cluster.ray_resource} slots "
                "were not available in time; other jobs hold them (see `ray status`)"
            )

    def start(self) -> None:
        """Start an actor in every slot and wait until all are ready. Raises ClusterError past cluster.start_timeout."""
        for slot in self._slots:
            self._start_worker(slot)
        self.wait_for_workers(len(self._slots))
        self._is_started = True

    @property
    def nodes(self) -> set[str]:
        """The ids of the nodes on which slots are reserved."""
        tables = [placement_group_table(group) for group in self._placement_groups]  # type: ignore[no-untyped-call]
        return {node for table in tables for node in table["bundles_to_node_id"].values() if node}

    def scale_up_to(self, count: int) -> None:
        """Reserve slots until there are `count`, and start an actor in each new slot; return at once.

        An actor starts as soon as the cluster has room for it.
        """
        tp = self._config.parallel.tp
        missing = max(0, count - len(self._slots))
        for slot in self._reserve([tp] * (missing // tp) + [1] * (missing % tp)):
            self._slots.append(slot)
            self._start_worker(slot)

    def wait_for_workers(self, count: int) -> None:
        """Start due replacements and block until `count` actors are ready; ClusterError past cluster.start_timeout."""
        self._refill_slots(time.monotonic())
        timeout = self._config.cluster.start_timeout
        deadline = time.monotonic() + timeout
        while (missing := count - len(self.ready)) > 0 and self._starting and time.monotonic() < deadline:
            descriptions = [worker.description_ref for worker in self._starting]
            ready, _ = ray.wait(
                descriptions,
                num_returns=min(missing, len(descriptions)),
                timeout=max(0.0, deadline - time.monotonic()),
            )
            self._register_started(ready)  # one that failed to start is started again
        if len(self.ready) < count:
            raise ClusterError(
                f"cluster.start_timeout={timeout:g}: only {len(self.ready)} of {count} workers were ready in time; see "
                "`ray status` and the worker logs, or raise it"
            )

    def poll_started(self) -> bool:
        """Add actors that have become ready to `ready`, without blocking, and return whether there were any.

        Also starts replacements in slots that have been vacant for a second.
        """
        self._refill_slots(time.monotonic() - _REPLACEMENT_DELAY_S)
        if not self._starting:
            return False
        descriptions = [worker.description_ref for worker in self._starting]
        ready, _ = ray.wait(descriptions, num_returns=len(descriptions), timeout=0)
        count = len(self.ready)
        self._register_started(ready)
        return len(self.ready) > count

    def put_spec(self, spec: WorkerSpec) -> Any:
        """Serialize the spec of a generation once for all actors, and return the reference to it.

        Actors that start later warm up with it. A user's dataset was serialized by the first call.
        """
        self._warmup_spec = self._dataset_store.store_dataset(spec)
        return ray.put(self._warmup_spec)

    def replace_worker(self, worker: Worker) -> None:
        """Kill an actor in any state. Its replacement is started by a later `poll_started` or `wait_for_workers`."""
        if worker in self.ready:
            self.ready.remove(worker)
            ray.kill(worker.actor, no_restart=True)
            self._vacant_slots.append((time.monotonic(), worker.slot))

    def replace_workers_on_node(self, node_id: str) -> None:
        """Replace all actors on a lost node."""
        for worker in [worker for worker in self.ready if worker.info["node_id"] == node_id]:
            self.replace_worker(worker)

    def _refill_slots(self, vacant_before: float) -> None:
        """Start an actor in every slot that is vacant since `vacant_before` or earlier (monotonic seconds)."""
        slots = [slot for since, slot in self._vacant_slots if since <= vacant_before]
        self._vacant_slots = [(since, slot) for since, slot in self._vacant_slots if since > vacant_before]
        for slot in slots:
            self._start_worker(slot)

    def close(self) -> None:
        """Kill all actors and remove the placement groups."""
        for worker in [*self.ready, *self._starting]:
            ray.kill(worker.actor, no_restart=True)
        for group in self._placement_groups:
            remove_placement_group(group)

    def _reserve(self, bundle_sizes: Sequence[int], nodes: Sequence[str] = ()) -> list[Slot]:
        """Reserve one bundle per entry of `bundle_sizes`, and return its slots: as many per bundle as its size.

        The bundles of the first reservation are on different nodes, on `nodes` if given.
        """
        if not bundle_sizes:
            return []
        strategy = "PACK" if self._placement_groups or len(bundle_sizes) == 1 else "STRICT_SPREAD"
        group = placement_group(
            [{self._cluster.ray_resource: bundle_size} for bundle_size in bundle_sizes],
            strategy=strategy,
            bundle_label_selector=[{"ray.io/node-id": node} for node in nodes] or None,
        )
        self._placement_groups.append(group)
        return [(group, bundle) for bundle, bundle_size in enumerate(bundle_sizes) for _ in range(bundle_size)]

    def _start_worker(self, slot: Slot) -> None:
        gpus = 1 if self._cluster.device == "cuda" else 0
        actor = self._actor_class.options(
            num_cpus=0 if gpus else 1,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=slot[0], placement_group_bundle_index=slot[1]
            ),
        ).remote(self._cluster.device, self._config.cluster.cpu_threads)
        description_ref = actor.describe.remote(self._config, self._warmup_spec)
        self._starting.append(Worker(self._num_started, actor, slot, description_ref))
        self._num_started += 1

    def _register_started(self, ready: list[Any]) -> None:
        """Move started actors from `_starting` to `ready`; retry replacements that failed to start, a few times."""
        for worker in [worker for worker in self._starting if worker.description_ref in ready]:
            self._starting.remove(worker)
            try:
                worker.info = ray.get(worker.description_ref)
            except RayError as error:
                if not self._is_started and isinstance(cause := getattr(error, "cause", None), RaytrainError):
                    raise cause from error
                if not self._is_started:
                    raise ClusterError(f"a worker did not start: {describe_actor_death(error)}") from error
                self._failed_starts += 1
                _log.warning("a replacement worker did not start: %s", describe_actor_death(error))
                if self._failed_starts <= _MAX_START_ATTEMPTS:  # afterwards the run continues without it
                    self._start_worker(worker.slot)
                continue
            worker.info["node"] = self._node_names.get_name(worker.info["node_id"], worker.info["host"])
            self._failed_starts = 0
            self.ready.append(worker)
