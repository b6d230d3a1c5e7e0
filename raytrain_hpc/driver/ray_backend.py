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
from raytrain_hpc.driver.backend import Wish
from raytrain_hpc.driver.health_monitor import Watch
from raytrain_hpc.driver.node_drain import Drains
from raytrain_hpc.driver.ray_cluster import connected
from raytrain_hpc.driver.ray_topology import CPU_WORKERS_BY_DEFAULT, topology, world_size
from raytrain_hpc.driver.record_poller import Listener
from raytrain_hpc.driver.rendezvous_store import RendezvousStore
from raytrain_hpc.driver.root_cause import PEER_GONE, innocence
from raytrain_hpc.driver.straggler_detector import Pace
from raytrain_hpc.driver.throttle import Sparing
from raytrain_hpc.driver.worker_group import Actors, Worker, last_line
from raytrain_hpc.elastic.fault_attribution import Call, blame, pending
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.elastic.state_partition import State, parts
from raytrain_hpc.elastic.watchdog import Suspect, deadlocked
from raytrain_hpc.errors import RaytrainError, WorkerFailed
from raytrain_hpc.planner.layout import fixed_world, model_ranks
from raytrain_hpc.planner.placement import node_shares
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.runtime.control_channel import Ended, Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec

_LOOK_S = 0.05  # between two looks at signs of life and requests; the end of a worker is heard at once
_ANSWER_S = 10.0
_SAY_S = 0.3
_BREAK_S = 0.2  # a collective whose peer has died breaks sooner

Info = dict[str, Any]


class RayFleet:
    """A connected cluster, the store at which its workers meet, and how many there are.

    `readers`: whether processes on the cluster read for the workers.
    """

    def __init__(self, world: int, cluster: Topology, store: RendezvousStore, *, readers: bool, lasting: bool):
        self.world, self.lasting = world, lasting
        self.cluster, self._store, self._readers = cluster, store, readers

    @property
    def placed(self) -> tuple[Topology, RendezvousStore]:
        """The nodes, and the store at which workers on them meet."""
        return self.cluster, self._store

    def crew(self, config: Config) -> RayWorkers:
        """Fresh actors."""
        actors = Actors(config, self.world + config.cluster.spares, self.cluster)
        return RayWorkers(config, actors, self._store, readers=self._readers)


@contextmanager
def open_ray_fleet(config: Config) -> Iterator[RayFleet]:
    """Connect to Ray, or start it, and count the slots."""
    # The store needs torch, whose import takes as long as Ray's start and can pass while Ray and workers come up.
    threading.Thread(target=import_module, args=("torch",), daemon=True).start()
    wanted = fixed_world(config) or max(CPU_WORKERS_BY_DEFAULT, model_ranks(config))
    with connected(config, wanted + config.cluster.spares) as started:
        cluster = topology(config)
        world = world_size(config, cluster)
        # Refuses a world that the cluster is too small for, before anything is written.
        node_shares(world + config.cluster.spares, cluster, config.parallel.tp)
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        store = RendezvousStore(host, config)
        # A Ray that is there for this run alone has no CPUs beside those of the workers.
        readers = config.data.engine == "ray" or (config.data.engine == AUTO and not started)
        yield RayFleet(world, cluster, store, readers=readers, lasting=not started)


class RayWorkers:
    """The actors of a run, some of which are the ranks of its present generation."""

    def __init__(self, config: Config, actors: Actors, store: RendezvousStore, *, readers: bool):
        self._config, self._actors, self._store, self._readers = config, actors, store, readers
        self._drains = Drains()
        self._watch, self._pace = Watch(config), Pace(config.fault.straggler_factor)
        self._ranks: list[Worker] = []
        self._runs: dict[Any, int] = {}  # the answers that are waited for, and whose
        self._feeder: Any = None
        self._generation = 0
        self._numbers: dict[int, list[int]] = {}  # generation -> which part of the state each of its ranks holds
        self._was: dict[tuple[int, int], int] = {}  # (generation, worker) -> its rank there
        self._load: list[int] = []  # microbatches of each rank
        self._listener = Listener([], lambda record: None)
        self._broken: dict[int, Sequence[Call]] = {}  # what ranks were last in, of those that broke

    def start(self) -> None:
        """Start the actors, and agents beside them. Raises ClusterError past cluster.start_timeout."""
        self._watch.expect(self._actors.nodes)
        self._actors.start()

    def wait(self, count: int) -> None:
        """Wait until `count` workers are up. Raises ClusterError past cluster.start_timeout."""
        self._actors.wait(count)

    def extend(self, count: int) -> None:
        """Have `count` workers, besides spares: those that are missing come up behind what runs."""
        self._actors.extend(count + self._config.cluster.spares)

    def candidates(self) -> list[Candidate]:
        """Who can be given a rank: all that are up, with what they hold since their last generation."""
        self._actors.arrived()
        leaving = self._drains.nodes()
        return [
            Candidate(
                one.number,
                node := one.info["node"],
                one.info["pid"],
                one.held,
                one.pace,
                node in leaving,
                one.info["rack"],
            )
            for one in self._actors.up
        ]

    def arrange(self, members: tuple[int, ...]) -> list[Info]:
        """Number the ranks of the next generation. Returns who and where each is."""
        by_number = {worker.number: worker for worker in self._actors.up}
        self._ranks = [by_number[number] for number in members]
        for node in self._drains.nodes() - {worker.info["node"] for worker in self._ranks}:
            self._watch.forget(node)
            self._actors.replace_all_on(node)
        return [{"rank": rank, **worker.info} for rank, worker in enumerate(self._ranks)]

    def run(
        self,
        spec: WorkerSpec,
        handle: Callable[[Record], None],
        stop: threading.Event,
        regroup: Callable[[], Wish],
    ) -> str:
        """One generation, its records passed on. Returns "done", "stopped", "lost", or "paused", as `regroup` asked.

        Raises WorkerFailed naming the guilty rank, or a worker's own RaytrainError. Whoever is left can go on.
        """
        self._launch(spec, handle)
        left, stopping, pausing = list(self._runs), False, False
        wishing = Sparing(_LOOK_S)
        while left:
            ready, left = ray.wait(left, num_returns=1, timeout=_LOOK_S)
            if ready and left:  # most end together
                more, left = ray.wait(left, num_returns=len(left), timeout=0)
                ready = [*ready, *more]
            if any(self._failure(run, self._runs[run]) is not None for run in ready):
                raise self._fall(time.time(), [])
            if left and (guilty := [*self._given_up(), *self._slow(handle)]):
                raise self._fall(time.time(), guilty)
            if stop.is_set() and not stopping:
                stopping = True
                self._tell("request_stop")
            if not (stopping or pausing) and wishing.due():
                with wishing.doing():
                    wish = regroup()
                if wish is not None:
                    pausing = True
                    self._tell("request_pause" if wish == "pause" else "request_stop")
            self._listener.listen(self._watch.signs(), hurry=stopping)
        self._listener.finish()
        ended = [self._ended(run, rank) for run, rank in self._runs.items()]
        return ended[0].outcome

    def recall(self, after: int, until: int) -> list[Record]:
        """The metrics of these steps, from the first rank that is left and has come so far: not all were fetched."""
        for worker in self._ranks:
            if worker in self._actors.up and any(state.step >= until for state in worker.held):
                try:
                    recalled: list[Record] = ray.get(worker.actor.recall.remote(after), timeout=_ANSWER_S)
                    return [metrics for metrics in recalled if metrics["step"] <= until]
                except RayError:
                    continue
        return []

    def forget(self) -> None:
        """What workers hold in memory is of no use."""
        for worker in self._actors.up:
            worker.held = ()

    def close(self) -> None:
        """End all actors and give their slots back."""
        self._end_feeder()
        self._watch.close()
        self._actors.close()

    def _launch(self, spec: WorkerSpec, handle: Callable[[Record], None]) -> None:
        self.forget()  # until they end; who is no member holds what nobody will go on from
        self._generation = spec.generation
        self._numbers[spec.generation] = parts(spec.layout)
        self._was |= {(spec.generation, worker.number): rank for rank, worker in enumerate(self._ranks)}
        self._load = spec.loads
        meeting = self._store.meeting(spec.generation)
        self._end_feeder()
        if self._readers and spec.blocks.groups:
            from raytrain_hpc.data.loader.ray_loader import start_feeder  # not every run needs it

            self._feeder = start_feeder(spec.recipe, spec.blocks)
        sent = ray.put(spec)  # once for all, however many they are
        self._runs = {
            worker.actor.run.remote(sent, rank, meeting, self._feeder): rank for rank, worker in enumerate(self._ranks)
        }
        self._actors.rehearsed = spec
        for spare in (worker for worker in self._actors.up if worker not in self._ranks):
            spare.actor.rehearse.remote(sent)
        self._pace = Pace(self._config.fault.straggler_factor)
        self._listener, self._broken = Listener([worker.actor for worker in self._ranks], handle), {}
        self._watch.begin({"rank": rank, **worker.info} for rank, worker in enumerate(self._ranks))

    def _end_feeder(self) -> None:
        if self._feeder is not None:
            ray.kill(self._feeder, no_restart=True)  # readers end with the feeder, who owns them
            self._feeder = None

    def _tell(self, method: str) -> None:
        for worker in self._ranks:
            getattr(worker.actor, method).remote()

    def _ended(self, run: Any, rank: int) -> Ended:
        """How a rank's part ended; of those that are left, what they hold is noted. Raises RayError."""
        ended: Ended = ray.get(run)
        self._ranks[rank].held = tuple(self._states(rank, ended))
        if ended.outcome == "broken":
            self._broken[rank] = ended.calls
        return ended

    def _states(self, rank: int, ended: Ended) -> Iterator[State]:
        """What a rank holds.

        Who broke before its state was loaded holds that of an earlier generation: then its own states are those of its
        rank there, and copies go by ranks of that generation.
        """
        before = self._was.get((ended.taken_in, self._ranks[rank].number))
        if before is not None:
            numbers = self._numbers[ended.taken_in]
            for one, steps in {before: ended.steps, **ended.copies}.items():
                for step in steps:
                    yield State(ended.taken_in, numbers[one], max(numbers) + 1, step)

    def _failure(self, run: Any, rank: int) -> RaytrainError | None:
        try:
            ended = self._ended(run, rank)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RaytrainError):
                return cause
            return self._failed(rank, "raised", last_line(error))
        except RayError as error:
            return self._failed(rank, "died", last_line(error).split(" Some common causes")[0])
        if ended.outcome == "differs":
            return self._failed(rank, "corrupt" if rank in ended.differing else "replicas differ", ended.reason)
        return self._failed(rank, "raised", ended.reason) if ended.outcome == "broken" else None

    def _given_up(self) -> list[WorkerFailed]:
        """The ranks that are to be ended, if any."""
        found = self._watch.suspects()
        if lost := self._on_lost_nodes(broken=bool(found)):
            return list(lost.values())
        if found:
            return self._accused(found)
        return [self._failed(rank, "silent", "gave no answer on its control path") for rank in self._listener.silent()]

    def _slow(self, handle: Callable[[Record], None]) -> list[WorkerFailed]:
        """Says who keeps the others waiting; the ranks that are to be ended for it."""
        if not self._pace.due():
            return []
        policy, evicted = self._config.fault.on_straggler, []
        for rank, factor in self._pace.look(self._watch.signs(), self._load).items():
            failure = self._failed(rank, "slow", f"works {factor:.1f} times as long as the others for the same")
            if policy == "evict":
                evicted.append(failure)
                continue
            known, self._ranks[rank].pace = self._ranks[rank].pace, factor
            if known > 1.0:  # said, and acted on, in an earlier generation
                continue
            keys = ("kind", "rank", "node", "pid", "reason")
            handle({"type": "incident", "operation": "training", **{key: getattr(failure, key) for key in keys}})
        return evicted

    def _on_lost_nodes(self, *, broken: bool) -> dict[int, WorkerFailed]:
        """The ranks on nodes that do not answer any more, if any."""
        nodes = self._watch.lost(broken=broken)
        return {
            rank: self._failed(rank, "node lost", "its node gives no answer")
            for rank, worker in enumerate(self._ranks)
            if worker.info["node"] in nodes
        }

    def _accused(self, found: Sequence[Suspect]) -> list[WorkerFailed]:
        """Of ranks that show no life, those that the others wait for; none where that is no fault or cannot be told."""
        detected, silent = time.time(), {one.rank: one for one in found}
        kinds: dict[int, str] = {one.rank: one.kind for one in found if one.kind != "stalled"}
        answers = self._calls(rank for rank in range(len(self._ranks)) if rank not in kinds)
        blamed = blame(answers)
        if not kinds and blamed:
            kinds = {rank: blamed.kind for rank in blamed.ranks if rank in silent}
        if not kinds and not blamed:  # alone with its own work, or with its silence
            kinds = {rank: "stalled" for rank in silent if not any(call.pending for call in answers.get(rank, ()))}
            kinds = {} if len(kinds) == len(self._ranks) or kinds.keys() - answers.keys() else kinds
        if not kinds and deadlocked(found, len(self._ranks)):
            kinds = {min(silent): "deadlocked"}
        if not kinds:
            return []
        stacks, operation = self._watch.stacks(), blamed.operation if blamed else pending(answers)
        guilty = []
        for rank, kind in sorted(kinds.items()):
            failure = self._failed(rank, kind, f"no sign of life for {silent[rank].silent_s:.1f} s")
            failure.last_seen, failure.operation, failure.stacks = detected - silent[rank].silent_s, operation, stacks
            guilty.append(failure)
        return guilty

    def _calls(self, ranks: Iterable[int]) -> dict[int, Sequence[Call]]:
        """The collectives that these ranks were last in, of those that say so soon."""
        asked = {rank: self._ranks[rank].actor.calls.remote() for rank in ranks}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_SAY_S) if asked else ([], [])
        calls: dict[int, Sequence[Call]] = {}
        for rank, answer in asked.items():
            with contextlib.suppress(RayError):
                calls |= {rank: ray.get(answer)} if answer in ready else {}
        return calls

    def _fall(self, detected: float, known: Sequence[WorkerFailed]) -> RaytrainError:
        """A generation falls: end who is known to be guilty, wait for the others, and name the one that began it.

        Of all that failed that is a dead process, or one given up on, before one that does not end before an exception
        of its own before one that was in another collective than the rest.
        """
        seen, failures = list(self._listener.seen), {failure.rank: failure for failure in known}
        for failure in known:
            self._watch.kill(failure.node, failure.rank)
        self._store.fall(self._generation)
        for rank, found in self._endings().items():
            if not isinstance(found, WorkerFailed):
                return found
            failures.setdefault(rank, found)
        self._name_out_of_step(failures)
        guilty = min(failures.values(), key=lambda one: (innocence(one), one.rank))
        guilty.ranks = tuple(sorted(rank for rank, one in failures.items() if innocence(one) < PEER_GONE))
        for rank in guilty.ranks:
            self._actors.replace(self._ranks[rank])
        for node in {failure.node for failure in failures.values() if failure.kind == "node lost"}:
            self._watch.forget(node)
            self._actors.replace_all_on(node)
        self._listener.finish(_SAY_S, without=guilty.ranks)
        guilty.detected = detected
        guilty.last_seen = seen[guilty.rank] if guilty not in known else guilty.last_seen
        guilty.operation = guilty.operation or pending(self._broken)
        return guilty

    def _endings(self) -> dict[int, RaytrainError]:
        """How all ranks ended that did not end well. Those on a node that does not answer are not waited for."""
        settle_s, left = self._watch.settle_s(), list(self._runs)
        failures: dict[int, RaytrainError] = {}
        began, aborted = time.monotonic(), False
        while left and time.monotonic() < began + settle_s:
            ready, left = ray.wait(left, num_returns=len(left), timeout=_LOOK_S)
            if left and not aborted and time.monotonic() > began + _BREAK_S:
                aborted = True
                self._tell("abort")  # their collectives do not break by themselves
            for run in ready:
                if (found := self._failure(run, self._runs[run])) is not None:
                    failures[self._runs[run]] = found
            lost = self._on_lost_nodes(broken=True) if left else {}
            failures |= {rank: lost[rank] for rank in (self._runs[run] for run in left) if rank in lost}
            left = [run for run in left if self._runs[run] not in lost]
        for rank in (self._runs[run] for run in left):
            failures[rank] = self._failed(rank, "silent", f"did not end within {settle_s:g} s")
        return failures

    def _name_out_of_step(self, failures: dict[int, WorkerFailed]) -> None:
        """Where collectives broke and nobody is gone, somebody was in another one than the rest."""
        broken = all(one.kind == "raised" and innocence(one) == PEER_GONE for one in failures.values())
        if broken and (told := blame(self._broken)):
            for rank in told.ranks:
                failures[rank] = self._failed(rank, told.kind, failures[rank].reason)
                failures[rank].operation = told.operation

    def _failed(self, rank: int, kind: str, reason: str) -> WorkerFailed:
        info = self._ranks[rank].info
        return WorkerFailed(
            rank, info["node"], info["pid"], kind, reason, detected=time.time(), last_seen=self._listener.seen[rank]
        )
