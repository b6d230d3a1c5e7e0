"""Workers on Ray: run a generation, watch it, and after a failure name the failed ranks and keep the survivors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.backend import RegroupRequest, T
from raytrain_hpc.driver.capacity_view import CapacityView
from raytrain_hpc.driver.coordinator_client import CoordinatorClient
from raytrain_hpc.driver.corruption_attribution import attribute_corruption
from raytrain_hpc.driver.data_feeder import DataFeeder
from raytrain_hpc.driver.exit_deadline import ExitDeadline
from raytrain_hpc.driver.failure_explanation import (
    add_traceback,
    attribute_disagreement,
    attribute_out_of_step,
    explain_deaths,
    explain_stall,
    is_error_of_all_ranks,
)
from raytrain_hpc.driver.health_monitor import HealthMonitor
from raytrain_hpc.driver.ray_messages import DeathMessageFilter, describe_actor_death, extract_last_line
from raytrain_hpc.driver.record_poller import RecordPoller
from raytrain_hpc.driver.rendezvous_store import RendezvousStore
from raytrain_hpc.driver.root_cause import AVOIDED_KINDS, CONSEQUENCE, NODE_KINDS, cascade_order
from raytrain_hpc.driver.spare_audits import SpareAudits
from raytrain_hpc.driver.state_locations import StateLocations
from raytrain_hpc.driver.straggler_detector import StragglerDetector
from raytrain_hpc.driver.throttle import Throttle
from raytrain_hpc.driver.worker_group import ActorPool, Worker, WorkerInfo, call_on_nodes, recall_metrics
from raytrain_hpc.elastic.audit_verdict import DISPUTED
from raytrain_hpc.elastic.cluster_following import NodeCapacity
from raytrain_hpc.elastic.death_report import OUT_OF_MEMORY, is_out_of_memory
from raytrain_hpc.elastic.device_allocation import Allowance
from raytrain_hpc.elastic.failure_budget import PREEMPTED
from raytrain_hpc.elastic.fault_attribution import CollectiveCall, describe_pending_call
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.errors import CheckpointCorruptedError, RaytrainError, WorkerFailedError
from raytrain_hpc.runtime.control_channel import GenerationOutcome, Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec

_POLL_INTERVAL_S = 0.05  # between two checks of health and requests; `ray.wait` returns at once when a rank ends
_REPLY_TIMEOUT_S, _ABORT_DELAY_S = 0.3, 0.2  # a collective whose peer has died fails before it is aborted


class RayWorkerGroup:
    """The actors of a run, some of which are the ranks of the current generation."""

    def __init__(
        self,
        config: Config,
        pool: ActorPool,
        store: RendezvousStore,
        *,
        ray_readers: bool,
        capacity: CapacityView | None = None,
        coordinator: CoordinatorClient | None = None,
    ):
        """Initialize the group. `capacity`: of a cluster that the run follows; `coordinator`: of the runs on it."""
        self._coordinator = coordinator or CoordinatorClient(config)
        self._config, self._pool, self._store = config, pool, store
        self._capacity, self._death_messages = capacity, DeathMessageFilter()
        self._health, self._stragglers = HealthMonitor(config), StragglerDetector(config.fault.straggler_factor)
        self._workers: list[Worker] = []
        self._rank_of_run: dict[Any, int] = {}  # reference of each rank's run call -> rank
        self._feeder = DataFeeder(is_enabled=ray_readers)
        self._generation, self._locations = 0, StateLocations(self._health)
        self._microbatch_counts: list[int] = []  # of each rank, per step
        self._poller = RecordPoller([], lambda record: None)
        self._broken_calls: dict[int, Sequence[CollectiveCall]] = {}  # rank -> its last collectives, if it failed
        self._spare_audits = SpareAudits(store)

    def start(self) -> None:
        """Start the actors, and an agent per node. Raises ClusterError past cluster.start_timeout."""
        self._death_messages.install()
        self._health.start_agents(self._pool.nodes)
        self._pool.start()

    def wait_for_workers(self, count: int, timeout_s: float | None = None) -> None:
        """Block until `count` workers are ready, up to `timeout_s` seconds or cluster.start_timeout."""
        self._pool.wait_for_workers(count, timeout_s)

    def get_capacity(self) -> tuple[NodeCapacity, ...] | None:
        """Return the live nodes of the cluster that the run follows, as of about a second ago; None if it does not.

        Slots on nodes that have left are given up, and unused ones beyond the allowance. Dead spares are replaced.
        """
        self._pool.replace_ended_spares(self._workers)
        return None if self._capacity is None else self._capacity.update(self._workers)

    def get_allowance(self) -> Allowance:
        """Return the devices that the run may hold beside other runs."""
        return self._coordinator.get_allowance()

    def scale_up_to(self, count: int, wanted: int | None = None) -> None:
        """Start workers until there are `count` besides spares; return at once. `wanted`: see the protocol."""
        self._coordinator.set_target(count, wanted)
        self._pool.scale_up_to(self.get_allowance().limit(count + self._config.cluster.spares), self.get_capacity())

    def list_candidates(self) -> list[Candidate]:
        """Return all ready workers, with the states that they have held since their last generation.

        If the driver's own node is about to be removed, so is the run: all of them count as draining.
        """
        self._pool.poll_started()
        self._pool.drain_monitor.announce(self._health.find_preempted_nodes())
        draining_nodes = self._pool.drain_monitor.get_draining_nodes()
        is_driver_removed = self._pool.drain_monitor.will_be_removed(self._health.local_node)
        staying = [worker for worker in self._pool.ready if worker.info["node_id"] not in draining_nodes]
        held_by_node = self._locations.list_held(staying)
        return [
            Candidate(
                worker.worker_id,
                node_id := worker.info["node_id"],
                worker.info["pid"],
                worker.states,
                worker.slowdown,
                is_driver_removed or node_id in draining_nodes,
                worker.info["rack"],
                worker.info.get("has_local_files", False),
                self._pool.is_cold(worker),
                held_by_node.get(node_id, ()),
            )
            for worker in self._pool.ready
        ]

    def set_members(self, members: tuple[int, ...]) -> list[WorkerInfo]:
        """Set the workers of the next generation in rank order, and return host and device facts of each rank.

        Workers on draining nodes without members are killed and replaced.
        """
        worker_of_id = {worker.worker_id: worker for worker in self._pool.ready}
        self._workers = [worker_of_id[worker_id] for worker_id in members]
        self._death_messages.hide(worker.info for worker in self._pool.ready)
        for node_id in self._pool.drain_monitor.get_draining_nodes() - {w.info["node_id"] for w in self._workers}:
            self._leave_node(node_id)
        return [{"rank": rank, **worker.info} for rank, worker in enumerate(self._workers)]

    def run_generation(
        self,
        spec: WorkerSpec,
        on_record: Callable[[Record], None],
        stop_event: threading.Event,
        poll_regroup: Callable[[], RegroupRequest],
    ) -> str:
        """Run one generation; see `WorkerGroup`. Raises the root cause of a failure, or a worker's RaytrainError."""
        self._launch_generation(spec, on_record)
        pending, stopping, pausing = list(self._rank_of_run), False, False
        throttle = Throttle(_POLL_INTERVAL_S, max_delay_s=2.0)  # for other runs, which wait for devices
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_INTERVAL_S)
            if ready and pending:  # most ranks end at the same time
                more_ready, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
                ready = [*ready, *more_ready]
            if any(self._get_failure(run_ref, self._rank_of_run[run_ref]) is not None for run_ref in ready):
                raise self._abort_generation(time.time(), [])
            if pending and (failures := [*self._find_unresponsive_ranks(), *self._handle_stragglers(on_record)]):
                raise self._abort_generation(time.time(), failures)
            if stop_event.is_set() and not stopping:
                stopping = True
                self._call_all_ranks("request", "stop", self._generation)
            if not (stopping or pausing) and throttle.is_ready():
                with throttle.measure():
                    self._pool.warm_up_spares(self._workers)
                    self._audit_by_spares()
                    request = poll_regroup()
                if request is not None:
                    pausing = True
                    self._call_all_ranks("request", "pause" if request == "pause" else "stop", self._generation)
            self._poller.poll(self._health.collect_health(), urgent=stopping)
        self._spare_audits.end_generation()
        self._poller.fetch_remaining()
        outcomes = [self._collect_outcome(run_ref, rank) for run_ref, rank in self._rank_of_run.items()]
        if self._spare_audits.is_disputed:  # ranks had agreed to end before they were told
            raise self._abort_generation(time.time(), [])
        return outcomes[0].outcome

    def _audit_by_spares(self) -> None:
        """Let idle spares audit the ranks, replace those at fault, and let the ranks go back if they disagree."""
        audits, steps = self._spare_audits, [health.step for health in self._health.collect_health().values()]
        idle = self._pool.list_warm_spares(self._workers)
        self._pool.replace_spares(*audits.update(self._workers, idle, min(steps, default=0)))
        if audits.take_request():
            self._call_all_ranks("request", "distrust", self._generation)

    def recall_metrics(self, after_step: int, until_step: int) -> list[Record]:
        """Return the metrics of these steps from the first survivor that has reached `until_step`, or from a node."""
        survivors = [worker for worker in self._workers if worker in self._pool.ready]
        return recall_metrics(survivors, after_step, until_step, self._health.recall_metrics)

    def list_held_parts(self) -> tuple[StatePart, ...]:
        """Return the state parts that nodes hold of workers that are lost."""
        return self._locations.list_held_parts()

    def call_on_nodes(self, function: Callable[[], T], timeout_s: float) -> dict[str, T]:
        """Call a function in one member per node, and return the results by node id."""
        return call_on_nodes(self._workers, function, timeout_s)

    def discard_state(self) -> None:
        """Forget which states the workers and nodes hold in memory."""
        self._locations.forget_held()
        for worker in self._pool.ready:
            worker.states = ()

    def close(self) -> None:
        """Kill all actors and agents, and release the slots."""
        self._feeder.stop()
        self._health.close()
        self._pool.close()
        self._death_messages.remove()
        self._coordinator.leave()

    def _launch_generation(self, spec: WorkerSpec, on_record: Callable[[Record], None]) -> None:
        """Start the run calls of all members, and watch the new ranks."""
        disputed_step = self._spare_audits.disputed_step
        spec = self._locations.plan_restore(replace(spec, disputed_step=disputed_step), self._workers)
        self.discard_state()  # members report theirs when they end; that of other workers becomes outdated
        self._generation = spec.generation
        self._locations.begin_generation(spec, self._workers)
        self._microbatch_counts = spec.num_microbatches_by_rank
        rendezvous = self._store.create_rendezvous(spec.generation)
        feeder = self._feeder.restart(spec)
        spec_ref = self._pool.put_spec(spec)
        self._pool.spare_warmup.begin_run(self._workers)
        self._rank_of_run = {
            worker.actor.run.remote(spec_ref, rank, rendezvous, feeder): rank
            for rank, worker in enumerate(self._workers)
        }
        self._stragglers = StragglerDetector(self._config.fault.straggler_factor)
        actors, deliver = [worker.actor for worker in self._workers], partial(self._deliver_record, on_record)
        self._spare_audits.begin_generation(spec, spec_ref, deliver)
        self._poller, self._broken_calls = RecordPoller(actors, deliver), {}
        self._health.begin_generation([{"rank": r, **w.info} for r, w in enumerate(self._workers)], spec.memory_step)

    def _deliver_record(self, on_record: Callable[[Record], None], record: Record) -> None:
        """Pass on a record of a rank. An incident gets the place of the rank that it is about, which may be another."""
        if record["type"] == "incident" and record["rank"] is not None:
            record = {**self._describe_rank(record["rank"]), **record}
        on_record(record)

    def _leave_node(self, node_id: str) -> None:
        """End the agent and all actors on a node that is lost or drained."""
        self._health.remove_node(node_id)
        self._pool.leave_node(node_id)
        if self._capacity is not None:
            self._capacity.exclude_node(node_id)

    def _call_all_ranks(self, method: str, *arguments: Any) -> None:
        """Call a method of every rank's actor without waiting."""
        for worker in self._workers:
            getattr(worker.actor, method).remote(*arguments)

    def _collect_outcome(self, run_ref: Any, rank: int) -> GenerationOutcome:
        """Return the outcome of a rank whose run call has ended, and note the states that it holds. Raises RayError."""
        outcome: GenerationOutcome = ray.get(run_ref)
        self._workers[rank].states = tuple(self._locations.list_states(self._workers[rank], outcome))
        if outcome.outcome == "broken":
            self._broken_calls[rank] = outcome.calls
        return outcome

    def _get_failure(self, run_ref: Any, rank: int) -> RaytrainError | None:
        """Return the error with which a rank's run call ended, or None if it ended well."""
        try:
            outcome = self._collect_outcome(run_ref, rank)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RaytrainError):
                return cause
            return self._build_failure(rank, "raised", extract_last_line(error))
        except RayError as error:
            kind = OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else "died"
            return self._build_failure(rank, kind, describe_actor_death(error))
        if outcome.outcome == "damaged":
            return CheckpointCorruptedError(outcome.reason)
        if outcome.outcome == "differs":
            kind = attribute_corruption(rank, outcome, self._workers, self._generation)
            return self._build_failure(rank, kind, outcome.reason)
        if outcome.outcome != "broken":
            return None
        kind = OUT_OF_MEMORY if is_out_of_memory(outcome.reason) else "raised"
        return add_traceback(self._build_failure(rank, kind, outcome.reason), outcome)

    def _find_unresponsive_ranks(self) -> list[WorkerFailedError]:
        """Return failures of ranks on lost nodes, else of stalled ranks, else of ranks that send no records."""
        suspects = self._health.find_suspects()
        if lost_ranks := self._find_ranks_on_lost_nodes(rank_failed=bool(suspects)):
            return list(lost_ranks.values())
        if suspects:
            return explain_stall(suspects, self._workers, self._health, self._build_failure)
        return [self._build_failure(rank, "silent", "does not reply") for rank in self._poller.find_silent_ranks()]

    def _handle_stragglers(self, on_record: Callable[[Record], None]) -> list[WorkerFailedError]:
        """Report newly detected slow ranks, and return failures of those to evict (fault.on_straggler=evict)."""
        if not self._stragglers.is_due():
            return []
        policy, evicted = self._config.fault.on_straggler, []
        for rank, factor in self._stragglers.detect(self._health.collect_health(), self._microbatch_counts).items():
            reason = f"takes {factor:.1f} times as long as the others per microbatch"
            failure = self._build_failure(rank, "slow", reason)
            if policy == "evict":
                evicted.append(failure)
                continue
            previous, self._workers[rank].slowdown = self._workers[rank].slowdown, factor
            if previous > 1.0:  # reported and acted on in an earlier generation
                continue
            keys = ("kind", "rank", "node", "node_id", "pid", "reason", "device")
            on_record({"type": "incident", "operation": "training", **{key: getattr(failure, key) for key in keys}})
        return evicted

    def _find_ranks_on_lost_nodes(self, *, rank_failed: bool) -> dict[int, WorkerFailedError]:
        """Return the failures of ranks on nodes that no longer reply, by rank."""
        nodes = self._health.find_lost_nodes(rank_failed=rank_failed)
        return {
            rank: self._build_failure(rank, "node lost", "its node does not reply")
            for rank, worker in enumerate(self._workers)
            if worker.info["node_id"] in nodes
        }

    def _abort_generation(self, detected: float, known_failures: Sequence[WorkerFailedError]) -> RaytrainError:
        """End all ranks after a failure, replace the failed workers, and return the root cause for the caller to raise.

        Ranks of `known_failures` are killed first. The root cause is the failure lowest in `cascade_order`, then rank.
        """
        self._spare_audits.end_generation()
        failures, last_seen = {f.rank: f for f in known_failures}, self._health.list_last_seen(self._poller.seen_at)
        for failure in known_failures:
            self._health.kill_rank(failure.node_id, failure.rank)
        self._store.abort_generation(self._generation)
        exits, aborted = self._collect_exits(), time.time()
        for rank, error in exits.items():
            if not isinstance(error, WorkerFailedError):  # the run may continue: replace the workers that cannot
                for stuck in (rank for rank, exit in exits.items() if getattr(exit, "kind", "raised") != "raised"):
                    self._pool.replace_worker(self._workers[stuck])
                self._poller.fetch_remaining(_REPLY_TIMEOUT_S)  # ranks report their last step before they end so
                return error
            failures.setdefault(rank, error)
        explain_deaths(failures, self._health, self._build_failure)
        attribute_out_of_step(failures, self._broken_calls, self._build_failure)
        attribute_disagreement(failures, self._spare_audits, self._pool.ready, self._build_failure)
        root_cause = min(failures.values(), key=lambda failure: (cascade_order(failure), failure.rank))
        root_cause.ranks = tuple(sorted(rank for rank, error in failures.items() if cascade_order(error) < CONSEQUENCE))
        root_cause.is_on_all_ranks = is_error_of_all_ranks(failures, len(self._workers))
        for rank in (rank for rank in root_cause.ranks if failures[rank].kind != DISPUTED):
            self._pool.replace_worker(self._workers[rank])
        left_nodes = {failure.node_id for failure in failures.values() if failure.kind in NODE_KINDS}
        left_nodes |= self._pool.avoid_nodes(f.node_id for f in failures.values() if f.kind in AVOIDED_KINDS)
        # Also nodes of spares alone: Ray lists a lost node for seconds, with slots that do not exist any more.
        left_nodes |= set(self._health.find_lost_nodes(rank_failed=True))
        for node_id in left_nodes:
            self._leave_node(node_id)
        self._poller.fetch_remaining(_REPLY_TIMEOUT_S, exclude=root_cause.ranks)
        self._locations.collect_held(self._pool.ready, failures.values())
        root_cause.detected_at, root_cause.aborted_at = detected, aborted
        root_cause.last_seen = last_seen[root_cause.rank] if root_cause not in known_failures else root_cause.last_seen
        root_cause.operation = root_cause.operation or describe_pending_call(self._broken_calls)
        return root_cause

    def _collect_exits(self) -> dict[int, RaytrainError]:
        """Wait until all ranks have ended, except those on lost nodes, and return the errors of those that failed."""
        deadline, pending = ExitDeadline(self._health), list(self._rank_of_run)
        failures: dict[int, RaytrainError] = {}
        start, aborted = time.monotonic(), False
        while pending and not deadline.has_passed([self._rank_of_run[ref] for ref in pending]):
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_INTERVAL_S)
            if pending and not aborted and time.monotonic() > start + _ABORT_DELAY_S:
                aborted = True
                self._call_all_ranks("abort")  # some collectives do not fail by themselves
            for ref in ready:
                if (error := self._get_failure(ref, self._rank_of_run[ref])) is not None:
                    failures[self._rank_of_run[ref]] = error
            lost = self._find_ranks_on_lost_nodes(rank_failed=True) if pending else {}
            failures |= {rank: lost[rank] for rank in (self._rank_of_run[ref] for ref in pending) if rank in lost}
            pending = [ref for ref in pending if self._rank_of_run[ref] not in lost]
        silent, reason = (self._rank_of_run[ref] for ref in pending), f"did not end within {deadline.settle_s:g} s"
        return failures | {rank: self._build_failure(rank, "silent", reason) for rank in silent}

    def _build_failure(self, rank: int, kind: str, reason: str) -> WorkerFailedError:
        info = self._workers[rank].info
        if kind in ("died", "node lost") and self._pool.drain_monitor.was_announced(info["node_id"]):
            kind, reason = PREEMPTED, f"{reason}; the removal of its node was announced"
        last_seen, place = self._health.list_last_seen(self._poller.seen_at)[rank], self._describe_rank(rank)
        return WorkerFailedError(rank, kind=kind, reason=reason, detected_at=time.time(), last_seen=last_seen, **place)

    def _describe_rank(self, rank: int) -> dict[str, Any]:
        place = {key: self._workers[rank].info[key] for key in ("node", "pid", "node_id")}
        return place | {"device": self._health.describe_device(rank)}
