"""The actors of a run: their slots in a placement group, their start, and others in the place of those that ended."""

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
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.placement import assign_workers_to_nodes
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.worker.actor import WorkerActor

_log = logging.getLogger(__name__)
_MAX_START_ATTEMPTS = 3  # to start one in the place of another, in a row
_REPLACEMENT_DELAY_S = 1.0  # a start takes a CPU for seconds: those that are left come first

WorkerInfo = dict[str, Any]


Slot = tuple[PlacementGroup, int]  # and which of its bundles


@dataclass(eq=False)
class Worker:
    """One actor. `info` says who and where it is, once it is up; `held` what it had in memory when it last ended."""

    worker_id: int
    actor: Any
    slot: Slot
    description_ref: Any
    info: WorkerInfo = field(default_factory=dict)
    states: tuple[StatePart, ...] = ()
    slowdown: float = 1.0  # how many times as long as others it was seen to work for a step


class ActorPool:
    """An actor a slot, in node-shaped bundles. One that ends is followed by another in its slot."""

    def __init__(self, config: Config, count: int, cluster: Topology, actor_class: Any = WorkerActor):
        """Raises ClusterError where `count` slots are not free within cluster.start_timeout. `kind`: a Ray actor."""
        self._starting: list[Worker] = []
        self._vacant_slots: list[tuple[float, Slot]] = []  # since when
        self.ready: list[Worker] = []
        self._num_started, self._failed_starts, self._is_started = 0, 0, False
        self._config, self._cluster, self._actor_class = config, cluster, actor_class
        self.warmup_spec: WorkerSpec | None = None  # what those who come up behind a run are warmed up with
        self._placement_groups: list[PlacementGroup] = []
        shares = assign_workers_to_nodes(count, cluster, config.parallel.tp)
        # Without racks one node is as good as another, and Ray knows best which are free.
        self._slots = self._reserve(list(shares.values()), list(shares) if cluster.has_racks else ())
        if not self._placement_groups[0].wait(config.cluster.start_timeout):
            self.close()
            raise ClusterError(
                f"cluster.start_timeout={config.cluster.start_timeout:g}: {count} free {cluster.ray_resource} slots did "
                "not turn up; other jobs hold them (see `ray status`)"
            )

    def start(self) -> None:
        """Start all and learn where each is. Raises ClusterError past cluster.start_timeout."""
        for slot in self._slots:
            self._start_worker(slot)
        self.wait_for_workers(len(self._slots))
        self._is_started = True

    @property
    def nodes(self) -> set[str]:
        """Where slots are."""
        tables = [placement_group_table(group) for group in self._placement_groups]  # type: ignore[no-untyped-call]
        return {node for table in tables for node in table["bundles_to_node_id"].values() if node}

    def scale_up_to(self, count: int) -> None:
        """Have `count` slots in all. What is missing comes up behind what runs, as soon as the cluster has room."""
        together = self._config.parallel.tp
        missing = max(0, count - len(self._slots))
        for slot in self._reserve([together] * (missing // together) + [1] * (missing % together)):
            self._slots.append(slot)
            self._start_worker(slot)

    def wait_for_workers(self, count: int) -> None:
        """Wait until `count` are up. Raises ClusterError past cluster.start_timeout."""
        self._refill_slots(time.monotonic())
        timeout = self._config.cluster.start_timeout
        missing = count - len(self.ready)
        described = [worker.description_ref for worker in self._starting]
        ready, _ = ray.wait(described, num_returns=min(missing, len(described)), timeout=timeout)
        self._register_started(ready)
        if len(self.ready) < count:
            raise ClusterError(
                f"cluster.start_timeout={timeout:g}: only {len(self.ready)} of {count} workers were up in time; see "
                "`ray status` and the worker logs, or raise it"
            )

    def poll_started(self) -> bool:
        """Whether any came up since the last look, all of which are now in `up`."""
        self._refill_slots(time.monotonic() - _REPLACEMENT_DELAY_S)
        if not self._starting:
            return False
        described = [worker.description_ref for worker in self._starting]
        ready, _ = ray.wait(described, num_returns=len(described), timeout=0)
        before = len(self.ready)
        self._register_started(ready)
        return len(self.ready) > before

    def replace_worker(self, worker: Worker) -> None:
        """Have done with one, whatever state it is in. Another one comes up in its slot, behind what runs."""
        if worker in self.ready:
            self.ready.remove(worker)
            ray.kill(worker.actor, no_restart=True)
            self._vacant_slots.append((time.monotonic(), worker.slot))

    def replace_workers_on_node(self, node: str) -> None:
        """The same for all on a node that is gone."""
        for worker in [one for one in self.ready if one.info["node"] == node]:
            self.replace_worker(worker)

    def _refill_slots(self, vacant_before: float) -> None:
        """Start a worker in every slot that has been vacant since before this moment."""
        due = [slot for since, slot in self._vacant_slots if since <= vacant_before]
        self._vacant_slots = [(since, slot) for since, slot in self._vacant_slots if since > vacant_before]
        for slot in due:
            self._start_worker(slot)

    def close(self) -> None:
        """End all and give their slots back."""
        for worker in [*self.ready, *self._starting]:
            ray.kill(worker.actor, no_restart=True)
        for group in self._placement_groups:
            remove_placement_group(group)

    def _reserve(self, shares: Sequence[int], nodes: Sequence[str] = ()) -> list[Slot]:
        """A node-shaped bundle a share; those of a first reservation on as many nodes, on these if any are named."""
        if not shares:
            return []
        strategy = "PACK" if self._placement_groups or len(shares) == 1 else "STRICT_SPREAD"
        group = placement_group(
            [{self._cluster.ray_resource: share} for share in shares],
            strategy=strategy,
            bundle_label_selector=[{"ray.io/node-id": node} for node in nodes] or None,
        )
        self._placement_groups.append(group)
        return [(group, bundle) for bundle, share in enumerate(shares) for _ in range(share)]

    def _start_worker(self, slot: Slot) -> None:
        gpus = 1 if self._cluster.device == "cuda" else 0
        actor = self._actor_class.options(
            num_cpus=0 if gpus else 1,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=slot[0], placement_group_bundle_index=slot[1]
            ),
        ).remote(self._cluster.device, self._config.cluster.threads)
        described = actor.describe.remote(self._config, self.warmup_spec)
        self._starting.append(Worker(self._num_started, actor, slot, described))
        self._num_started += 1

    def _register_started(self, ready: list[Any]) -> None:
        for worker in [worker for worker in self._starting if worker.description_ref in ready]:
            self._starting.remove(worker)
            try:
                worker.info = ray.get(worker.description_ref)
            except RayError as error:
                if not self._is_started:
                    raise ClusterError(f"a worker did not start: {extract_last_line(error)}") from error
                self._failed_starts += 1
                _log.warning("a worker did not come up behind the run: %s", extract_last_line(error))
                if self._failed_starts <= _MAX_START_ATTEMPTS:  # then the run goes on without it
                    self._start_worker(worker.slot)
                continue
            self._failed_starts = 0
            self.ready.append(worker)


def extract_last_line(error: BaseException) -> str:
    """The line of a Ray error that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
