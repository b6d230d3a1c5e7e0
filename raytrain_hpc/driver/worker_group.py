"""The Ray actors of a run: their slots in placement groups, their start, and the replacement of failed ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.backend import T
from raytrain_hpc.driver.dataset_store import DatasetStore
from raytrain_hpc.driver.node_drain import NodeDrainMonitor
from raytrain_hpc.driver.node_names import NodeNames
from raytrain_hpc.driver.ray_messages import describe_actor_death
from raytrain_hpc.driver.slot_reservations import Slot, SlotReservations
from raytrain_hpc.driver.spare_health import SpareHealth
from raytrain_hpc.driver.spare_warmup import SpareWarmup, WarmupState
from raytrain_hpc.driver.vacant_slots import VacantSlots
from raytrain_hpc.elastic.cluster_following import NodeCapacity, plan_reservations
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.errors import ClusterError, RaytrainError
from raytrain_hpc.planner.placement import assign_workers_to_nodes
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.worker.actor import WorkerActor

_log = logging.getLogger(__name__)
_REPLACEMENT_DELAY_S = 1.0  # a start takes a CPU for seconds: let the surviving ranks resume first
_RECALL_TIMEOUT_S = 10.0
_REFILL_INTERVAL_S = 0.5  # between two looks whether a vacant slot may be filled

WorkerInfo = dict[str, Any]


@dataclass(eq=False)
class Worker:
    """One actor, with host and device facts once it is ready, and the states it held after its last generation.

    `info["node_id"]` is Ray's identifier of its node, `info["node"]` the node's name for messages and records.
    """

    worker_id: int
    actor: Any
    slot: Slot
    description_ref: Any
    start_time: float  # monotonic seconds
    info: WorkerInfo = field(default_factory=dict)
    states: tuple[StatePart, ...] = ()
    slowdown: float = 1.0  # time for the same work, relative to the other ranks
    suspected_in: int = 0  # the generation in which it first disagreed with another rank about a microbatch; 0: none
    warmup: WarmupState = field(default_factory=WarmupState)


def call_on_nodes(workers: Sequence[Worker], function: Callable[[], T], timeout_s: float) -> dict[str, T]:
    """Call a function in one of these workers per node, and return the results by node id.

    A node whose worker does not answer in time, or dies, is left out. Raises the RaytrainError that a call raises.
    """
    worker_of_node = {worker.info["node_id"]: worker for worker in workers}
    refs = {node_id: worker.actor.call.remote(function) for node_id, worker in worker_of_node.items()}
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    results: dict[str, T] = {}
    for node_id, ref in refs.items():
        if ref not in ready:
            continue
        try:
            results[node_id] = ray.get(ref)
        except RayError as error:
            if isinstance(cause := getattr(error, "cause", None), RaytrainError):
                raise cause from error
            _log.warning("a worker did not answer: %s", describe_actor_death(error))
    return results


def recall_metrics(
    workers: Sequence[Worker],
    after_step: int,
    until_step: int,
    recall_from_nodes: Callable[[int], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Return the metrics of the steps after `after_step` up to `until_step` that are in memory.

    Those of the first worker that reached `until_step`; if none answers, `recall_from_nodes(after_step)`.
    """
    for worker in workers:
        if any(state.step >= until_step for state in worker.states):
            try:
                recalled: list[dict[str, Any]] = ray.get(
                    worker.actor.recall.remote(after_step), timeout=_RECALL_TIMEOUT_S
                )
                return [metrics for metrics in recalled if metrics["step"] <= until_step]
            except RayError:
                continue
    return [metrics for metrics in recall_from_nodes(after_step) if metrics["step"] <= until_step]


class ActorPool:
    """One actor per slot, in bundles that each fit on a node. A failed actor is replaced in its slot.

    If the run follows the cluster, each slot belongs to a node, and is given up with it.
    """

    def __init__(
        self,
        config: Config,
        count: int,
        cluster: Topology,
        actor_class: Any = WorkerActor,
        *,
        nodes: Sequence[NodeCapacity] | None = None,
        stop_event: threading.Event | None = None,
    ):
        """Reserve `count` slots on `cluster`. Raises ClusterError if they are not free within cluster.start_timeout.

        `actor_class`: a Ray actor with the interface of WorkerActor. `nodes`: the nodes of a cluster that the run
        follows; their slots need not be free in time. `stop_event`: ends this wait with ClusterError, and that of
        `start`.
        """
        self._stop_event = stop_event or threading.Event()
        self._starting: list[Worker] = []
        self._vacant_slots = VacantSlots()
        self.ready: list[Worker] = []
        self._num_started, self._is_started = 0, False
        self._config, self._cluster, self._actor_class = config, cluster, actor_class
        self.drain_monitor, self._node_names = NodeDrainMonitor(), NodeNames(cluster)
        self.spare_warmup, self._spare_health = SpareWarmup(), SpareHealth[Worker]()
        self._warmup_spec: WorkerSpec | None = None  # for the warm-up of actors that start during a run
        self._dataset_store = DatasetStore()
        self._reservations = SlotReservations(cluster.ray_resource)
        self._follows_cluster = nodes is not None
        if nodes is not None:
            self._reserve_on_nodes(count, nodes)
            return
        workers_by_node = assign_workers_to_nodes(count, cluster, config.parallel.tp)
        # Name the nodes only if racks matter; otherwise Ray chooses those that are free.
        self._reservations.reserve_together(
            list(workers_by_node.values()), list(workers_by_node) if cluster.has_racks else ()
        )
        if not self._reservations.wait_until_free(config.cluster.start_timeout, self._stop_event):
            self.close()
            if self._stop_event.is_set():
                raise ClusterError(f"stopped before {count} free {cluster.ray_resource} slots were available")
            raise ClusterError(
                f"cluster.start_timeout={config.cluster.start_timeout:g}: {count} free {cluster.ray_resource} slots "
                "were not available in time; other jobs hold them (see `ray status`)"
            )

    def start(self) -> None:
        """Start an actor in every slot and wait until all are ready. Raises ClusterError past cluster.start_timeout.

        If the run follows the cluster, do not wait: nodes may leave meanwhile. Returns soon after a stop was requested.
        """
        slots = self._reservations.slots
        for slot in slots:
            self._start_worker(slot)
        if not self._follows_cluster:
            self.wait_for_workers(len(slots), stop_event=self._stop_event)
            self._is_started = len(self.ready) == len(slots)

    @property
    def nodes(self) -> set[str]:
        """The ids of the nodes on which slots are reserved."""
        return self._reservations.find_nodes()

    def count_slots_by_node(self) -> dict[str, int]:
        """Return the number of slots on each node, of a run that follows the cluster."""
        return self._reservations.count_by_node()

    def count_slots(self) -> int:
        """Return the number of slots that are reserved."""
        return len(self._reservations.slots)

    def get_reservation_time(self, node_id: str) -> float:
        """Return when slots on a node were last reserved, in monotonic seconds; 0 if they were not."""
        return self._reservations.reserved_at.get(node_id, 0.0)

    def scale_up_to(self, count: int, nodes: Sequence[NodeCapacity] | None = None) -> None:
        """Reserve slots until there are `count`, and start an actor in each new slot; return at once.

        An actor starts as soon as the cluster has room for it. `nodes`: those of the cluster that the run follows.
        """
        if nodes is not None:
            slots = self._reserve_on_nodes(count, nodes)
        else:
            tp = self._config.parallel.tp
            missing = max(0, count - len(self._reservations.slots))
            slots = self._reservations.reserve_each([tp] * (missing // tp) + [1] * (missing % tp))
        for slot in slots:
            self._start_worker(slot)

    def wait_for_workers(
        self, count: int, timeout_s: float | None = None, stop_event: threading.Event | None = None
    ) -> None:
        """Start due replacements and block until `count` actors are ready.

        Raises ClusterError after `timeout_s` seconds (default: cluster.start_timeout), or if no actor is to start: none
        is missing, or those that are have failed to start again and again. Returns soon after `stop_event` is set.
        """
        timeout = self._config.cluster.start_timeout
        deadline = time.monotonic() + (timeout if timeout_s is None else timeout_s)
        while (missing := count - len(self.ready)) > 0 and (now := time.monotonic()) < deadline:
            if stop_event is not None and stop_event.is_set():
                return
            self._refill_slots(now)
            if not self._vacant_slots.is_start_likely(worker.slot for worker in self._starting):
                break
            is_polled = self._vacant_slots or stop_event is not None
            wait_s = min(deadline - now, _REFILL_INTERVAL_S) if is_polled else deadline - now
            descriptions = [worker.description_ref for worker in self._starting]
            if not descriptions:
                time.sleep(wait_s)
                continue
            ready, _ = ray.wait(descriptions, num_returns=min(missing, len(descriptions)), timeout=wait_s)
            self._register_started(ready)  # one that failed to start is started again
        if len(self.ready) < count:
            raise ClusterError(
                f"cluster.start_timeout={timeout:g}: only {len(self.ready)} of {count} workers were ready in time; see "
                "`ray status` and the worker logs, or raise it"
            )

    def poll_started(self) -> bool:
        """Add actors that have become ready to `ready`, without blocking, and return whether there were any.

        Also starts replacements in slots that have been vacant for a second, and gives up slots on a node of the
        cluster that the run follows if they were not free within cluster.start_timeout.
        """
        self._refill_slots(time.monotonic() - _REPLACEMENT_DELAY_S)
        if not self._starting:
            return False
        descriptions = [worker.description_ref for worker in self._starting]
        ready, _ = ray.wait(descriptions, num_returns=len(descriptions), timeout=0)
        count = len(self.ready)
        self._register_started(ready)
        self._release_unavailable_slots()
        return len(self.ready) > count

    def put_spec(self, spec: WorkerSpec) -> Any:
        """Serialize the spec of a generation once for all actors, and return the reference to it.

        Actors that start later warm up with it. A user's dataset was serialized by the first call.
        """
        self._warmup_spec = self._dataset_store.store_dataset(spec)
        spec_ref = ray.put(self._warmup_spec)
        self.spare_warmup.begin_generation(spec, spec_ref)
        return spec_ref

    def warm_up_spares(self, members: Sequence[Worker]) -> None:
        """Warm up the ready workers that are no members, in the background. Call while a generation runs."""
        for worker in self.spare_warmup.update(self._list_spares(members)):
            self.replace_worker(worker)

    def replace_ended_spares(self, members: Sequence[Worker]) -> None:
        """Replace the ready workers whose process has ended. That of one of `members` is a failure of the run instead.

        Call again and again. A slot in which spares end one after the other stays empty for longer and longer.
        """
        for worker, reason in self._spare_health.update(self._list_spares(members)).items():
            _log.warning("a spare on node %s is replaced: %s", worker.info["node"], reason)
            self.spare_warmup.record_death(worker)
            self.ready.remove(worker)
            ray.kill(worker.actor, no_restart=True)
            self._vacant_slots.add_after_idle_death(worker.slot, worker.info["node_id"])

    def is_cold(self, worker: Worker) -> bool:
        """Return whether other ranks would wait for a worker: it has to compile, or a spare does not answer."""
        has_to_compile = self._config.train.compile is True and worker.warmup.is_cold
        return has_to_compile or self._spare_health.is_silent(worker)

    def list_warm_spares(self, members: Sequence[Worker]) -> list[Worker]:
        """Return the ready workers that are no members and wait, after their warm-up."""
        spares = self._list_spares(members)
        return [worker for worker in spares if worker.warmup.call is None and not worker.warmup.is_cold]

    def _list_spares(self, members: Sequence[Worker]) -> list[Worker]:
        occupied = set(members)
        return [worker for worker in self.ready if worker not in occupied]

    def replace_worker(self, worker: Worker) -> None:
        """Kill an actor in any state. Its replacement is started by a later `poll_started` or `wait_for_workers`."""
        if worker in self.ready:
            self.ready.remove(worker)
            ray.kill(worker.actor, no_restart=True)
            self._vacant_slots.add(worker.slot, worker.info["node_id"])

    def replace_spares(self, wrong: Sequence[Worker], silent: Sequence[Worker]) -> None:
        """Replace spares that compute wrong, on other nodes if there are several, and those that do not answer."""
        self.avoid_nodes([worker.info["node_id"] for worker in wrong])
        for worker in (*wrong, *silent):
            self.replace_worker(worker)

    def avoid_nodes(self, node_ids: Iterable[str]) -> set[str]:
        """Use these nodes no more, although Ray says that they are alive, and return them: none if there is only one.

        Members that are there leave when the next generation begins.
        """
        avoided = set(node_ids) if len(self.nodes) > 1 else set()
        self.drain_monitor.avoid(avoided)
        return avoided

    def leave_node(self, node_id: str) -> None:
        """End all actors on a node that is lost or drained. Slots that belong to the node are given up.

        Actors in other slots are replaced when Ray has moved the slot to another node.
        """
        for worker in [worker for worker in self.ready if worker.info["node_id"] == node_id]:
            self.replace_worker(worker)
        self._release({slot for slot in self._reservations.slots if slot.node_id == node_id})

    def release_surplus(self, count: int, members: Sequence[Worker]) -> None:
        """Release slots until the run holds `count`, none in which one of `members` runs. Ends the workers in them.

        Those on nodes with few members come first, so that whole nodes become free.
        """
        released = self._reservations.choose_surplus(count, {worker.slot for worker in members})
        for worker in [worker for worker in self.ready if worker.slot in released]:
            self.ready.remove(worker)
            ray.kill(worker.actor, no_restart=True)
        self._release(released)

    def _reserve_on_nodes(self, count: int, nodes: Sequence[NodeCapacity]) -> list[Slot]:
        """Reserve slots on nodes until there are `count` on those that stay, and return the new slots."""
        reservations = plan_reservations(nodes, count, self._config.parallel.tp)
        return [
            slot
            for node_id, missing in reservations.items()
            for slot in self._reservations.reserve_on_node(node_id, missing)
        ]

    def _release_unavailable_slots(self) -> None:
        """Give up slots on nodes that other jobs have taken: no actor was ready there within cluster.start_timeout."""
        started_before = time.monotonic() - self._config.cluster.start_timeout
        occupied = {id(worker.slot.group) for worker in self.ready}
        self._release(
            {
                worker.slot
                for worker in self._starting
                if worker.slot.node_id and worker.start_time < started_before and id(worker.slot.group) not in occupied
            }
        )

    def _release(self, slots: set[Slot]) -> None:
        """Release slots, and forget the actors in them."""
        if not slots:
            return
        groups = {id(slot.group) for slot in slots}
        self._starting = [worker for worker in self._starting if id(worker.slot.group) not in groups]
        self._vacant_slots.release(groups)
        self._reservations.release(slots)

    def _refill_slots(self, vacant_before: float) -> None:
        """Start an actor in every slot that is vacant since `vacant_before` or earlier (monotonic seconds).

        A slot on a draining node waits until Ray has moved it.
        """
        if not self._vacant_slots:
            return
        for slot in self._vacant_slots.take_due(vacant_before, self.drain_monitor.get_draining_nodes()):
            self._start_worker(slot)

    def close(self) -> None:
        """Kill all actors and remove the placement groups."""
        for worker in [*self.ready, *self._starting]:
            ray.kill(worker.actor, no_restart=True)
        self._reservations.close()

    def _start_worker(self, slot: Slot) -> None:
        gpus = 1 if self._cluster.has_accelerators else 0
        actor = self._actor_class.options(
            num_cpus=0 if gpus else 1,
            num_gpus=gpus,
            scheduling_strategy=slot.strategy,
        ).remote(self._cluster.device, self._config.cluster.cpu_threads)
        description_ref = actor.describe.remote(self._config, self._warmup_spec)
        self._starting.append(Worker(self._num_started, actor, slot, description_ref, time.monotonic()))
        self._num_started += 1

    def _register_started(self, ready: list[Any]) -> None:
        """Move started actors from `_starting` to `ready`; those that failed to start are replaced later."""
        for worker in [worker for worker in self._starting if worker.description_ref in ready]:
            self._starting.remove(worker)
            try:
                worker.info = ray.get(worker.description_ref)
            except RayError as error:
                if not self._is_started and isinstance(cause := getattr(error, "cause", None), RaytrainError):
                    raise cause from error
                if not self._is_started and not self._follows_cluster:  # there, its node may just have left
                    raise ClusterError(f"a worker did not start: {describe_actor_death(error)}") from error
                _log.warning("a worker did not start: %s", describe_actor_death(error))
                self._vacant_slots.add_after_failed_start(worker.slot)
                continue
            worker.info["node"] = self._node_names.get_name(worker.info["node_id"], worker.info["host"])
            self._vacant_slots.record_start(worker.slot)
            self._is_started |= self._follows_cluster
            self.ready.append(worker)
