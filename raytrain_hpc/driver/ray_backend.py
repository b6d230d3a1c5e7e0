"""The crew of a run on Ray: a generation of it runs, is listened to, and leaves behind who can go on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.backend import RegroupRequest
from raytrain_hpc.driver.health_monitor import HealthMonitor
from raytrain_hpc.driver.node_drain import NodeDrainMonitor
from raytrain_hpc.driver.ray_cluster import connect_ray
from raytrain_hpc.driver.ray_topology import DEFAULT_CPU_WORKERS, read_topology, resolve_world_size
from raytrain_hpc.driver.record_poller import RecordPoller
from raytrain_hpc.driver.rendezvous_store import RendezvousStore
from raytrain_hpc.driver.root_cause import CONSEQUENCE, cascade_order
from raytrain_hpc.driver.straggler_detector import StragglerDetector
from raytrain_hpc.driver.throttle import Throttle
from raytrain_hpc.driver.worker_group import ActorPool, Worker, extract_last_line
from raytrain_hpc.elastic.fault_attribution import CollectiveCall, attribute_fault, describe_pending_call
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.elastic.state_partition import StatePart, compute_state_partition
from raytrain_hpc.elastic.watchdog import Suspect, is_deadlocked
from raytrain_hpc.errors import RaytrainError, WorkerFailedError
from raytrain_hpc.planner.layout import get_fixed_world_size, get_model_parallel_size
from raytrain_hpc.planner.placement import assign_workers_to_nodes
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.runtime.control_channel import GenerationOutcome, Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec

_POLL_INTERVAL_S = 0.05  # between two looks at signs of life and requests; the end of a worker is heard at once
_RECALL_TIMEOUT_S = 10.0
_REPLY_TIMEOUT_S = 0.3
_ABORT_DELAY_S = 0.2  # a collective whose peer has died breaks sooner

WorkerInfo = dict[str, Any]


class RayBackend:
    """A connected cluster, the store at which its workers meet, and how many there are.

    `readers`: whether processes on the cluster read for the workers.
    """

    def __init__(
        self, world: int, cluster: Topology, store: RendezvousStore, *, use_ray_readers: bool, is_external: bool
    ):
        self.world, self.is_external = world, is_external
        self.cluster, self._store, self._use_ray_readers = cluster, store, use_ray_readers

    @property
    def topology_and_store(self) -> tuple[Topology, RendezvousStore]:
        """The nodes, and the store at which workers on them meet."""
        return self.cluster, self._store

    def create_worker_group(self, config: Config) -> RayWorkerGroup:
        """Fresh actors."""
        actors = ActorPool(config, self.world + config.cluster.spares, self.cluster)
        return RayWorkerGroup(config, actors, self._store, use_ray_readers=self._use_ray_readers)


@contextmanager
def open_ray_backend(config: Config) -> Iterator[RayBackend]:
    """Connect to Ray, or start it, and count the slots."""
    # The store needs torch, whose import takes as long as Ray's start and can pass while Ray and workers come up.
    threading.Thread(target=import_module, args=("torch",), daemon=True).start()
    wanted = get_fixed_world_size(config) or max(DEFAULT_CPU_WORKERS, get_model_parallel_size(config))
    with connect_ray(config, wanted + config.cluster.spares) as started:
        cluster = read_topology(config)
        world = resolve_world_size(config, cluster)
        # Refuses a world that the cluster is too small for, before anything is written.
        assign_workers_to_nodes(world + config.cluster.spares, cluster, config.parallel.tp)
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        store = RendezvousStore(host, config)
        # A Ray that is there for this run alone has no CPUs beside those of the workers.
        readers = config.data.engine == "ray" or (config.data.engine == AUTO and not started)
        yield RayBackend(world, cluster, store, use_ray_readers=readers, is_external=not started)


class RayWorkerGroup:
    """The actors of a run, some of which are the ranks of its present generation."""

    def __init__(self, config: Config, actors: ActorPool, store: RendezvousStore, *, use_ray_readers: bool):
        self._config, self._actors, self._store, self._use_ray_readers = config, actors, store, use_ray_readers
        self._drain_monitor = NodeDrainMonitor()
        self._health_monitor, self._straggler_detector = (
            HealthMonitor(config),
            StragglerDetector(config.fault.straggler_factor),
        )
        self._workers: list[Worker] = []
        self._rank_of_run: dict[Any, int] = {}  # the answers that are waited for, and whose
        self._feeder: Any = None
        self._generation = 0
        self._state_partitions: dict[
            int, list[int]
        ] = {}  # generation -> which part of the state each of its ranks holds
        self._past_ranks: dict[tuple[int, int], int] = {}  # (generation, worker) -> its rank there
        self._microbatch_counts: list[int] = []  # microbatches of each rank
        self._record_poller = RecordPoller([], lambda record: None)
        self._broken_calls: dict[int, Sequence[CollectiveCall]] = {}  # what ranks were last in, of those that broke

    def start(self) -> None:
        """Start the actors, and agents beside them. Raises ClusterError past cluster.start_timeout."""
        self._health_monitor.start_agents(self._actors.nodes)
        self._actors.start()

    def wait_for_workers(self, count: int) -> None:
        """Wait until `count` workers are up. Raises ClusterError past cluster.start_timeout."""
        self._actors.wait_for_workers(count)

    def scale_up_to(self, count: int) -> None:
        """Have `count` workers, besides spares: those that are missing come up behind what runs."""
        self._actors.scale_up_to(count + self._config.cluster.spares)

    def list_candidates(self) -> list[Candidate]:
        """Who can be given a rank: all that are up, with what they hold since their last generation."""
        self._actors.poll_started()
        leaving = self._drain_monitor.get_draining_nodes()
        return [
            Candidate(
                one.worker_id,
                node := one.info["node"],
                one.info["pid"],
                one.states,
                one.slowdown,
                node in leaving,
                one.info["rack"],
            )
            for one in self._actors.ready
        ]

    def set_members(self, members: tuple[int, ...]) -> list[WorkerInfo]:
        """Number the ranks of the next generation. Returns who and where each is."""
        by_number = {worker.worker_id: worker for worker in self._actors.ready}
        self._workers = [by_number[number] for number in members]
        for node in self._drain_monitor.get_draining_nodes() - {worker.info["node"] for worker in self._workers}:
            self._health_monitor.remove_node(node)
            self._actors.replace_workers_on_node(node)
        return [{"rank": rank, **worker.info} for rank, worker in enumerate(self._workers)]

    def run_generation(
        self,
        spec: WorkerSpec,
        on_record: Callable[[Record], None],
        stop_event: threading.Event,
        poll_regroup: Callable[[], RegroupRequest],
    ) -> str:
        """One generation, its records passed on. Returns "done", "stopped", "lost", or "paused", as `regroup` asked.

        Raises WorkerFailed naming the guilty rank, or a worker's own RaytrainError. Whoever is left can go on.
        """
        self._launch_generation(spec, on_record)
        left, stopping, pausing = list(self._rank_of_run), False, False
        wishing = Throttle(_POLL_INTERVAL_S)
        while left:
            ready, left = ray.wait(left, num_returns=1, timeout=_POLL_INTERVAL_S)
            if ready and left:  # most end together
                more, left = ray.wait(left, num_returns=len(left), timeout=0)
                ready = [*ready, *more]
            if any(self._get_failure(run, self._rank_of_run[run]) is not None for run in ready):
                raise self._abort_generation(time.time(), [])
            if left and (guilty := [*self._find_unresponsive_ranks(), *self._handle_stragglers(on_record)]):
                raise self._abort_generation(time.time(), guilty)
            if stop_event.is_set() and not stopping:
                stopping = True
                self._call_all_ranks("request_stop")
            if not (stopping or pausing) and wishing.is_ready():
                with wishing.measure():
                    wish = poll_regroup()
                if wish is not None:
                    pausing = True
                    self._call_all_ranks("request_pause" if wish == "pause" else "request_stop")
            self._record_poller.poll(self._health_monitor.collect_health(), urgent=stopping)
        self._record_poller.fetch_remaining()
        ended = [self._collect_outcome(run, rank) for run, rank in self._rank_of_run.items()]
        return ended[0].outcome

    def recall_metrics(self, after_step: int, until_step: int) -> list[Record]:
        """The metrics of these steps, from the first rank that is left and has come so far: not all were fetched."""
        for worker in self._workers:
            if worker in self._actors.ready and any(state.step >= until_step for state in worker.states):
                try:
                    recalled: list[Record] = ray.get(worker.actor.recall.remote(after_step), timeout=_RECALL_TIMEOUT_S)
                    return [metrics for metrics in recalled if metrics["step"] <= until_step]
                except RayError:
                    continue
        return []

    def discard_state(self) -> None:
        """What workers hold in memory is of no use."""
        for worker in self._actors.ready:
            worker.states = ()

    def close(self) -> None:
        """End all actors and give their slots back."""
        self._kill_feeder()
        self._health_monitor.close()
        self._actors.close()

    def _launch_generation(self, spec: WorkerSpec, on_record: Callable[[Record], None]) -> None:
        self.discard_state()  # until they end; who is no member holds what nobody will go on from
        self._generation = spec.generation
        self._state_partitions[spec.generation] = compute_state_partition(spec.layout)
        self._past_ranks |= {(spec.generation, worker.worker_id): rank for rank, worker in enumerate(self._workers)}
        self._microbatch_counts = spec.microbatches_per_rank
        meeting = self._store.create_rendezvous(spec.generation)
        self._kill_feeder()
        if self._use_ray_readers and spec.block_plan.num_groups:
            from raytrain_hpc.data.loader.ray_loader import start_feeder  # not every run needs it

            self._feeder = start_feeder(spec.stream_recipe, spec.block_plan)
        sent = ray.put(spec)  # once for all, however many they are
        self._rank_of_run = {
            worker.actor.run.remote(sent, rank, meeting, self._feeder): rank
            for rank, worker in enumerate(self._workers)
        }
        self._actors.warmup_spec = spec
        for spare in (worker for worker in self._actors.ready if worker not in self._workers):
            spare.actor.rehearse.remote(sent)
        self._straggler_detector = StragglerDetector(self._config.fault.straggler_factor)
        self._record_poller, self._broken_calls = (
            RecordPoller([worker.actor for worker in self._workers], on_record),
            {},
        )
        self._health_monitor.begin_generation(
            {"rank": rank, **worker.info} for rank, worker in enumerate(self._workers)
        )

    def _kill_feeder(self) -> None:
        if self._feeder is not None:
            ray.kill(self._feeder, no_restart=True)  # readers end with the feeder, who owns them
            self._feeder = None

    def _call_all_ranks(self, method: str) -> None:
        for worker in self._workers:
            getattr(worker.actor, method).remote()

    def _collect_outcome(self, run: Any, rank: int) -> GenerationOutcome:
        """How a rank's part ended; of those that are left, what they hold is noted. Raises RayError."""
        ended: GenerationOutcome = ray.get(run)
        self._workers[rank].states = tuple(self._list_states(rank, ended))
        if ended.outcome == "broken":
            self._broken_calls[rank] = ended.calls
        return ended

    def _list_states(self, rank: int, outcome: GenerationOutcome) -> Iterator[StatePart]:
        """What a rank holds.

        Who broke before its state was loaded holds that of an earlier generation: then its own states are those of its
        rank there, and copies go by ranks of that generation.
        """
        before = self._past_ranks.get((outcome.snapshot_generation, self._workers[rank].worker_id))
        if before is not None:
            numbers = self._state_partitions[outcome.snapshot_generation]
            for one, steps in {before: outcome.steps, **outcome.replica_steps}.items():
                for step in steps:
                    yield StatePart(outcome.snapshot_generation, numbers[one], max(numbers) + 1, step)

    def _get_failure(self, run: Any, rank: int) -> RaytrainError | None:
        try:
            ended = self._collect_outcome(run, rank)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RaytrainError):
                return cause
            return self._build_failure(rank, "raised", extract_last_line(error))
        except RayError as error:
            return self._build_failure(rank, "died", extract_last_line(error).split(" Some common causes")[0])
        if ended.outcome == "differs":
            return self._build_failure(
                rank, "corrupt" if rank in ended.divergent_ranks else "replicas differ", ended.reason
            )
        return self._build_failure(rank, "raised", ended.reason) if ended.outcome == "broken" else None

    def _find_unresponsive_ranks(self) -> list[WorkerFailedError]:
        """The ranks that are to be ended, if any."""
        found = self._health_monitor.find_suspects()
        if lost := self._find_ranks_on_lost_nodes(rank_failed=bool(found)):
            return list(lost.values())
        if found:
            return self._attribute_stall(found)
        return [
            self._build_failure(rank, "silent", "gave no answer on its control path")
            for rank in self._record_poller.find_silent_ranks()
        ]

    def _handle_stragglers(self, on_record: Callable[[Record], None]) -> list[WorkerFailedError]:
        """Says who keeps the others waiting; the ranks that are to be ended for it."""
        if not self._straggler_detector.is_due():
            return []
        policy, evicted = self._config.fault.on_straggler, []
        for rank, factor in self._straggler_detector.detect(
            self._health_monitor.collect_health(), self._microbatch_counts
        ).items():
            failure = self._build_failure(rank, "slow", f"works {factor:.1f} times as long as the others for the same")
            if policy == "evict":
                evicted.append(failure)
                continue
            known, self._workers[rank].slowdown = self._workers[rank].slowdown, factor
            if known > 1.0:  # said, and acted on, in an earlier generation
                continue
            keys = ("kind", "rank", "node", "pid", "reason")
            on_record({"type": "incident", "operation": "training", **{key: getattr(failure, key) for key in keys}})
        return evicted

    def _find_ranks_on_lost_nodes(self, *, rank_failed: bool) -> dict[int, WorkerFailedError]:
        """The ranks on nodes that do not answer any more, if any."""
        nodes = self._health_monitor.find_lost_nodes(rank_failed=rank_failed)
        return {
            rank: self._build_failure(rank, "node lost", "its node gives no answer")
            for rank, worker in enumerate(self._workers)
            if worker.info["node"] in nodes
        }

    def _attribute_stall(self, suspects: Sequence[Suspect]) -> list[WorkerFailedError]:
        """Of ranks that show no life, those that the others wait for; none where that is no fault or cannot be told."""
        detected, silent = time.time(), {one.rank: one for one in suspects}
        kinds: dict[int, str] = {one.rank: one.kind for one in suspects if one.kind != "stalled"}
        answers = self._query_collectives(rank for rank in range(len(self._workers)) if rank not in kinds)
        blamed = attribute_fault(answers)
        if not kinds and blamed:
            kinds = {rank: blamed.kind for rank in blamed.ranks if rank in silent}
        if not kinds and not blamed:  # alone with its own work, or with its silence
            kinds = {rank: "stalled" for rank in silent if not any(call.is_pending for call in answers.get(rank, ()))}
            kinds = {} if len(kinds) == len(self._workers) or kinds.keys() - answers.keys() else kinds
        if not kinds and is_deadlocked(suspects, len(self._workers)):
            kinds = {min(silent): "deadlocked"}
        if not kinds:
            return []
        stacks, operation = (
            self._health_monitor.collect_stacks(),
            blamed.operation if blamed else describe_pending_call(answers),
        )
        guilty = []
        for rank, kind in sorted(kinds.items()):
            failure = self._build_failure(rank, kind, f"no sign of life for {silent[rank].silent_s:.1f} s")
            failure.last_seen, failure.operation, failure.stacks = detected - silent[rank].silent_s, operation, stacks
            guilty.append(failure)
        return guilty

    def _query_collectives(self, ranks: Iterable[int]) -> dict[int, Sequence[CollectiveCall]]:
        """The collectives that these ranks were last in, of those that say so soon."""
        asked = {rank: self._workers[rank].actor.calls.remote() for rank in ranks}
        ready, _ = (
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_REPLY_TIMEOUT_S) if asked else ([], [])
        )
        calls: dict[int, Sequence[CollectiveCall]] = {}
        for rank, answer in asked.items():
            with contextlib.suppress(RayError):
                calls |= {rank: ray.get(answer)} if answer in ready else {}
        return calls

    def _abort_generation(self, detected: float, failed_ranks: Sequence[WorkerFailedError]) -> RaytrainError:
        """A generation falls: end who is known to be guilty, wait for the others, and name the one that began it.

        Of all that failed that is a dead process, or one given up on, before one that does not end before an exception
        of its own before one that was in another collective than the rest.
        """
        seen, failures = list(self._record_poller.last_reply_unix), {failure.rank: failure for failure in failed_ranks}
        for failure in failed_ranks:
            self._health_monitor.kill_rank(failure.node, failure.rank)
        self._store.abort_generation(self._generation)
        for rank, found in self._collect_exits().items():
            if not isinstance(found, WorkerFailedError):
                return found
            failures.setdefault(rank, found)
        self._attribute_out_of_step(failures)
        guilty = min(failures.values(), key=lambda one: (cascade_order(one), one.rank))
        guilty.ranks = tuple(sorted(rank for rank, one in failures.items() if cascade_order(one) < CONSEQUENCE))
        for rank in guilty.ranks:
            self._actors.replace_worker(self._workers[rank])
        for node in {failure.node for failure in failures.values() if failure.kind == "node lost"}:
            self._health_monitor.remove_node(node)
            self._actors.replace_workers_on_node(node)
        self._record_poller.fetch_remaining(_REPLY_TIMEOUT_S, exclude=guilty.ranks)
        guilty.detected_at = detected
        guilty.last_seen = seen[guilty.rank] if guilty not in failed_ranks else guilty.last_seen
        guilty.operation = guilty.operation or describe_pending_call(self._broken_calls)
        return guilty

    def _collect_exits(self) -> dict[int, RaytrainError]:
        """How all ranks ended that did not end well. Those on a node that does not answer are not waited for."""
        settle_s, left = self._health_monitor.compute_settle_timeout_s(), list(self._rank_of_run)
        failures: dict[int, RaytrainError] = {}
        began, aborted = time.monotonic(), False
        while left and time.monotonic() < began + settle_s:
            ready, left = ray.wait(left, num_returns=len(left), timeout=_POLL_INTERVAL_S)
            if left and not aborted and time.monotonic() > began + _ABORT_DELAY_S:
                aborted = True
                self._call_all_ranks("abort")  # their collectives do not break by themselves
            for run in ready:
                if (found := self._get_failure(run, self._rank_of_run[run])) is not None:
                    failures[self._rank_of_run[run]] = found
            lost = self._find_ranks_on_lost_nodes(rank_failed=True) if left else {}
            failures |= {rank: lost[rank] for rank in (self._rank_of_run[run] for run in left) if rank in lost}
            left = [run for run in left if self._rank_of_run[run] not in lost]
        for rank in (self._rank_of_run[run] for run in left):
            failures[rank] = self._build_failure(rank, "silent", f"did not end within {settle_s:g} s")
        return failures

    def _attribute_out_of_step(self, failures: dict[int, WorkerFailedError]) -> None:
        """Where collectives broke and nobody is gone, somebody was in another one than the rest."""
        broken = all(one.kind == "raised" and cascade_order(one) == CONSEQUENCE for one in failures.values())
        if broken and (told := attribute_fault(self._broken_calls)):
            for rank in told.ranks:
                failures[rank] = self._build_failure(rank, told.kind, failures[rank].reason)
                failures[rank].operation = told.operation

    def _build_failure(self, rank: int, kind: str, reason: str) -> WorkerFailedError:
        info = self._workers[rank].info
        return WorkerFailedError(
            rank,
            info["node"],
            info["pid"],
            kind,
            reason,
            detected_at=time.time(),
            last_seen=self._record_poller.last_reply_unix[rank],
        )
