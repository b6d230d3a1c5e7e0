"""Workers on Ray: run a generation, watch it, and after a failure name the failed ranks and keep the survivors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.backend import RegroupRequest, T
from raytrain_hpc.driver.capacity_view import CapacityView
from raytrain_hpc.driver.coordinator_client import CoordinatorClient
from raytrain_hpc.driver.health_monitor import HealthMonitor
from raytrain_hpc.driver.ray_messages import DeathMessageFilter, describe_actor_death, extract_last_line
from raytrain_hpc.driver.record_poller import RecordPoller
from raytrain_hpc.driver.rendezvous_store import RendezvousStore
from raytrain_hpc.driver.root_cause import CONSEQUENCE, cascade_order
from raytrain_hpc.driver.straggler_detector import StragglerDetector
from raytrain_hpc.driver.throttle import Throttle
from raytrain_hpc.driver.worker_group import ActorPool, Worker, WorkerInfo, call_on_nodes, recall_metrics
from raytrain_hpc.elastic.cluster_following import NodeCapacity
from raytrain_hpc.elastic.device_allocation import Allowance
from raytrain_hpc.elastic.failure_budget import PREEMPTED
from raytrain_hpc.elastic.fault_attribution import CollectiveCall, attribute_fault, describe_pending_call
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.elastic.state_partition import StatePart, compute_state_partition
from raytrain_hpc.elastic.watchdog import Suspect, is_deadlocked
from raytrain_hpc.errors import CheckpointCorruptedError, RaytrainError, WorkerFailedError
from raytrain_hpc.runtime.control_channel import GenerationOutcome, Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec

_POLL_INTERVAL_S = 0.05  # between two checks of health and requests; `ray.wait` returns at once when a rank ends
_REPLY_TIMEOUT_S = 0.3
_NODE_KINDS = ("node lost", PREEMPTED)  # of failures that concern a whole node
_ABORT_DELAY_S = 0.2  # a collective whose peer has died fails sooner


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
        self._config, self._pool, self._store, self._ray_readers = config, pool, store, ray_readers
        self._capacity, self._death_messages = capacity, DeathMessageFilter()
        self._health, self._stragglers = HealthMonitor(config), StragglerDetector(config.fault.straggler_factor)
        self._workers: list[Worker] = []
        self._rank_of_run: dict[Any, int] = {}  # reference of each rank's run call -> rank
        self._feeder: Any = None
        self._generation = 0
        self._state_partitions: dict[int, list[int]] = {}  # generation -> part of the state of each rank
        self._past_ranks: dict[tuple[int, int], int] = {}  # (generation, worker id) -> rank
        self._microbatch_counts: list[int] = []  # of each rank, per step
        self._poller = RecordPoller([], lambda record: None)
        self._broken_calls: dict[int, Sequence[CollectiveCall]] = {}  # rank -> its last collectives, if it failed

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

        Slots on nodes that have left are given up, and those beyond the allowance that are unused.
        """
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
        return [
            Candidate(
                worker.worker_id,
                node_id := worker.info["node_id"],
                worker.info["pid"],
                worker.states,
                worker.slowdown,
                bool(draining_nodes & {node_id, self._health.local_node}),
                worker.info["rack"],
                worker.info.get("has_local_files", False),
                self._config.train.compile is True and worker.warmup.is_cold,
            )
            for worker in self._pool.ready
        ]

    def set_members(self, members: tuple[int, ...]) -> list[WorkerInfo]:
        """Set the workers of the next generation in rank order, and return host and device facts of each rank.

        Workers on draining nodes without members are killed and replaced.
        """
        worker_of_id = {worker.worker_id: worker for worker in self._pool.ready}
        self._workers = [worker_of_id[worker_id] for worker_id in members]
        self._death_messages.hide(worker.info for worker in self._workers)
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
                self._call_all_ranks("request_stop")
            if not (stopping or pausing) and throttle.is_ready():
                with throttle.measure():
                    self._pool.warm_up_spares(self._workers)
                    request = poll_regroup()
                if request is not None:
                    pausing = True
                    self._call_all_ranks("request_pause" if request == "pause" else "request_stop")
            self._poller.poll(self._health.collect_health(), urgent=stopping)
        self._poller.fetch_remaining()
        outcomes = [self._collect_outcome(run_ref, rank) for run_ref, rank in self._rank_of_run.items()]
        return outcomes[0].outcome

    def recall_metrics(self, after_step: int, until_step: int) -> list[Record]:
        """Return the metrics of these steps from the memory of the first survivor that has reached `until_step`."""
        survivors = [worker for worker in self._workers if worker in self._pool.ready]
        return recall_metrics(survivors, after_step, until_step)

    def call_on_nodes(self, function: Callable[[], T], timeout_s: float) -> dict[str, T]:
        """Call a function in one member per node, and return the results by node id."""
        return call_on_nodes(self._workers, function, timeout_s)

    def discard_state(self) -> None:
        """Forget which states the workers hold in memory."""
        for worker in self._pool.ready:
            worker.states = ()

    def close(self) -> None:
        """Kill all actors and agents, and release the slots."""
        self._kill_feeder()
        self._health.close()
        self._pool.close()
        self._death_messages.remove()
        self._coordinator.leave()

    def _launch_generation(self, spec: WorkerSpec, on_record: Callable[[Record], None]) -> None:
        """Start the run calls of all members, and watch the new ranks."""
        self.discard_state()  # members report theirs when they end; that of other workers becomes outdated
        self._generation = spec.generation
        self._state_partitions[spec.generation] = compute_state_partition(spec.layout)
        self._past_ranks |= {(spec.generation, worker.worker_id): rank for rank, worker in enumerate(self._workers)}
        self._microbatch_counts = spec.num_microbatches_by_rank
        rendezvous = self._store.create_rendezvous(spec.generation)
        self._kill_feeder()
        if self._ray_readers and spec.block_plan.num_groups:
            from raytrain_hpc.data.loader.ray_loader import start_feeder  # slow import that few runs need

            self._feeder = start_feeder(spec.stream_spec, spec.block_plan)
        spec_ref = self._pool.put_spec(spec)
        self._pool.spare_warmup.begin_run(self._workers)
        self._rank_of_run = {
            worker.actor.run.remote(spec_ref, rank, rendezvous, self._feeder): rank
            for rank, worker in enumerate(self._workers)
        }
        self._stragglers = StragglerDetector(self._config.fault.straggler_factor)
        self._poller, self._broken_calls = RecordPoller([worker.actor for worker in self._workers], on_record), {}
        self._health.begin_generation({"rank": rank, **worker.info} for rank, worker in enumerate(self._workers))

    def _leave_node(self, node_id: str) -> None:
        """End the agent and all actors on a node that is lost or drained."""
        self._health.remove_node(node_id)
        self._pool.leave_node(node_id)
        if self._capacity is not None:
            self._capacity.exclude_node(node_id)

    def _kill_feeder(self) -> None:
        """Kill the actor that feeds data to the ranks of the last generation, if there is one."""
        if self._feeder is not None:
            ray.kill(self._feeder, no_restart=True)  # its readers end with it
            self._feeder = None

    def _call_all_ranks(self, method: str) -> None:
        """Call a method of every rank's actor without waiting."""
        for worker in self._workers:
            getattr(worker.actor, method).remote()

    def _collect_outcome(self, run_ref: Any, rank: int) -> GenerationOutcome:
        """Return the outcome of a rank whose run call has ended, and note the states that it holds. Raises RayError."""
        outcome: GenerationOutcome = ray.get(run_ref)
        self._workers[rank].states = tuple(self._list_states(rank, outcome))
        if outcome.outcome == "broken":
            self._broken_calls[rank] = outcome.calls
        return outcome

    def _list_states(self, rank: int, outcome: GenerationOutcome) -> Iterator[StatePart]:
        """Yield the states in a rank's memory, its own and replicas. They can be those of an earlier generation."""
        past_rank = self._past_ranks.get((outcome.snapshot_generation, self._workers[rank].worker_id))
        if past_rank is not None:
            partition = self._state_partitions[outcome.snapshot_generation]
            for owner, steps in {past_rank: outcome.steps, **outcome.replica_steps}.items():
                for step in steps:
                    yield StatePart(outcome.snapshot_generation, partition[owner], max(partition) + 1, step)

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
            return self._build_failure(rank, "died", describe_actor_death(error))
        if outcome.outcome == "damaged":
            return CheckpointCorruptedError(outcome.reason)
        if outcome.outcome == "differs":
            return self._build_failure(
                rank, "corrupt" if rank in outcome.divergent_ranks else "replicas differ", outcome.reason
            )
        return self._build_failure(rank, "raised", outcome.reason) if outcome.outcome == "broken" else None

    def _find_unresponsive_ranks(self) -> list[WorkerFailedError]:
        """Return failures of ranks on lost nodes, else of stalled ranks, else of ranks that send no records."""
        suspects = self._health.find_suspects()
        if lost_ranks := self._find_ranks_on_lost_nodes(rank_failed=bool(suspects)):
            return list(lost_ranks.values())
        if suspects:
            return self._attribute_stall(suspects)
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
            keys = ("kind", "rank", "node", "node_id", "pid", "reason")
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

    def _attribute_stall(self, suspects: Sequence[Suspect]) -> list[WorkerFailedError]:
        """Return failures of the suspects that hold up the other ranks, or none if that cannot be decided yet."""
        detected, by_rank = time.time(), {suspect.rank: suspect for suspect in suspects}
        kinds: dict[int, str] = {suspect.rank: suspect.kind for suspect in suspects if suspect.kind != "stalled"}
        calls = self._query_collectives(rank for rank in range(len(self._workers)) if rank not in kinds)
        fault = attribute_fault(calls)
        if not kinds and fault:
            kinds = {rank: fault.kind for rank in fault.ranks if rank in by_rank}
        if not kinds and not fault:  # no rank differs from the rest: suspects that wait in no collective have stalled
            kinds = {rank: "stalled" for rank in by_rank if not any(call.is_pending for call in calls.get(rank, ()))}
            kinds = {} if len(kinds) == len(self._workers) or kinds.keys() - calls.keys() else kinds
        if not kinds and is_deadlocked(suspects, len(self._workers)):
            kinds = {min(by_rank): "deadlocked"}
        if not kinds:
            return []
        stacks, operation = self._health.collect_stacks(), fault.operation if fault else describe_pending_call(calls)
        failures = []
        for rank, kind in sorted(kinds.items()):
            failure = self._build_failure(rank, kind, f"no sign of life for {by_rank[rank].silent_s:.1f} s")
            failure.last_seen, failure.operation, failure.stacks = detected - by_rank[rank].silent_s, operation, stacks
            failures.append(failure)
        return failures

    def _query_collectives(self, ranks: Iterable[int]) -> dict[int, Sequence[CollectiveCall]]:
        """Return the last collectives of these ranks, without those that do not reply within 0.3 s."""
        refs = {rank: self._workers[rank].actor.recent_calls.remote() for rank in ranks}
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_REPLY_TIMEOUT_S) if refs else ([], [])
        calls: dict[int, Sequence[CollectiveCall]] = {}
        for rank, ref in refs.items():
            with contextlib.suppress(RayError):
                calls |= {rank: ray.get(ref)} if ref in ready else {}
        return calls

    def _abort_generation(self, detected: float, known_failures: Sequence[WorkerFailedError]) -> RaytrainError:
        """End all ranks after a failure, replace the failed workers, and return the root cause for the caller to raise.

        Ranks of `known_failures` are killed first. The root cause is the failure lowest in `cascade_order`, then rank.
        """
        last_seen, failures = list(self._poller.seen_at), {failure.rank: failure for failure in known_failures}
        for failure in known_failures:
            self._health.kill_rank(failure.node_id, failure.rank)
        self._store.abort_generation(self._generation)
        exits = self._collect_exits()
        for rank, error in exits.items():
            if not isinstance(error, WorkerFailedError):  # the run may continue: replace the workers that cannot
                for stuck in (rank for rank, exit in exits.items() if getattr(exit, "kind", "raised") != "raised"):
                    self._pool.replace_worker(self._workers[stuck])
                return error
            failures.setdefault(rank, error)
        self._attribute_out_of_step(failures)
        root_cause = min(failures.values(), key=lambda failure: (cascade_order(failure), failure.rank))
        root_cause.ranks = tuple(sorted(rank for rank, error in failures.items() if cascade_order(error) < CONSEQUENCE))
        for rank in root_cause.ranks:
            self._pool.replace_worker(self._workers[rank])
        left_nodes = {failure.node_id for failure in failures.values() if failure.kind in _NODE_KINDS}
        if self._capacity is not None:  # Ray lists a lost node for seconds, with slots that do not exist any more
            left_nodes |= set(self._health.find_lost_nodes(rank_failed=True))
        for node_id in left_nodes:
            self._leave_node(node_id)
        self._poller.fetch_remaining(_REPLY_TIMEOUT_S, exclude=root_cause.ranks)
        root_cause.detected_at = detected
        root_cause.last_seen = last_seen[root_cause.rank] if root_cause not in known_failures else root_cause.last_seen
        root_cause.operation = root_cause.operation or describe_pending_call(self._broken_calls)
        return root_cause

    def _collect_exits(self) -> dict[int, RaytrainError]:
        """Wait until all ranks have ended, except those on lost nodes, and return the errors of those that failed."""
        settle_s, pending = self._health.compute_settle_timeout_s(), list(self._rank_of_run)
        failures: dict[int, RaytrainError] = {}
        start, aborted = time.monotonic(), False
        while pending and time.monotonic() < start + settle_s:
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
        silent, reason = (self._rank_of_run[ref] for ref in pending), f"did not end within {settle_s:g} s"
        return failures | {rank: self._build_failure(rank, "silent", reason) for rank in silent}

    def _attribute_out_of_step(self, failures: dict[int, WorkerFailedError]) -> None:
        """Attribute failures that are broken collectives only to the ranks that called a different collective."""
        cascade = all(error.kind == "raised" and cascade_order(error) == CONSEQUENCE for error in failures.values())
        if cascade and (fault := attribute_fault(self._broken_calls)):
            for rank in fault.ranks:
                failures[rank] = self._build_failure(rank, fault.kind, failures[rank].reason)
                failures[rank].operation = fault.operation

    def _build_failure(self, rank: int, kind: str, reason: str) -> WorkerFailedError:
        info = self._workers[rank].info
        if kind in ("died", "node lost") and self._pool.drain_monitor.was_announced(info["node_id"]):
            kind, reason = PREEMPTED, f"{reason}; the removal of its node was announced"
        failure = WorkerFailedError(rank, info["node"], info["pid"], kind, reason, node_id=info["node_id"])
        failure.detected_at, failure.last_seen = time.time(), self._poller.seen_at[rank]
        return failure
