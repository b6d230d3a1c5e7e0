"""The workers of one generation as Ray actors: placed, started, listened to, and ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytrain_hpc.config import AUTO, Config
from raytrain_hpc.driver.cluster import connected
from raytrain_hpc.driver.inventory import CPU_WORKERS_BY_DEFAULT, topology, world_size
from raytrain_hpc.errors import ClusterError, RaytrainError, WorkerFailed
from raytrain_hpc.plan.layout import fixed_world, model_ranks
from raytrain_hpc.plan.placement import node_shares
from raytrain_hpc.plan.topology import Topology
from raytrain_hpc.worker.actor import WorkerActor
from raytrain_hpc.worker.spec import WorkerSpec

if TYPE_CHECKING:
    from raytrain_hpc.driver.rendezvous import RendezvousStore

_LISTEN_S = 1.0  # between two fetches of records: often enough to read along, seldom enough to cost nothing
_LOOK_S = 0.25  # between two looks at whether a stop was asked for; the end of a worker is heard at once
_HURRY_S = 0.05  # while stopping
_ANSWER_S = 10.0
_SETTLE_S = 1.0  # after a failure, wait this long for others to fail too: the first to be heard is not always guilty

Info = dict[str, Any]


class RayFleet:
    """A connected cluster, the store at which its workers meet, and how many there are.

    `readers`: whether processes on the cluster read for the workers.
    """

    def __init__(self, config: Config, world: int, cluster: Topology, store: RendezvousStore, *, readers: bool):
        self.world = world
        self._config, self._cluster, self._store, self._readers = config, cluster, store, readers

    def crew(self) -> RayWorkers:
        """Fresh actors for one generation."""
        return RayWorkers(self._config, self.world, self._cluster, self._store, readers=self._readers)


@contextmanager
def open_ray_fleet(config: Config) -> Iterator[RayFleet]:
    """Connect to Ray, or start it, and count the slots."""
    # The store needs torch, whose import takes as long as Ray's start and can pass while that is waited for.
    threading.Thread(target=import_module, args=("raytrain_hpc.driver.rendezvous",), daemon=True).start()
    with connected(config, fixed_world(config) or max(CPU_WORKERS_BY_DEFAULT, model_ranks(config))) as started:
        cluster = topology(config)
        world = world_size(config, cluster)
        # Refuses a world that the cluster is too small for, before anything is written.
        node_shares(world, cluster, config.parallel.tp)
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        from raytrain_hpc.driver.rendezvous import RendezvousStore

        store = RendezvousStore(host, config)
        # A Ray that is there for this run alone has no CPUs beside those of the workers.
        readers = config.data.engine == "ray" or (config.data.engine == AUTO and not started)
        yield RayFleet(config, world, cluster, store, readers=readers)


class RayWorkers:
    """One actor a slot, in a placement group of node-shaped bundles; ranks are numbered in node order."""

    def __init__(self, config: Config, world: int, cluster: Topology, store: RendezvousStore, *, readers: bool):
        self._config, self._cluster, self._store, self._readers = config, cluster, store, readers
        self._feeder: Any = None
        self._group = self._reserve(node_shares(world, cluster, config.parallel.tp))
        self._actors: list[Any] = []
        self._seen: list[float] = []  # when each rank last answered
        self.infos: list[Info] = []

    def start(self) -> list[Info]:
        """Start the actors and learn where each one is. Raises ClusterError past cluster.start_timeout."""
        gpus = 1 if self._cluster.device == "cuda" else 0
        actors = [
            WorkerActor.options(  # type: ignore[attr-defined]
                num_cpus=0 if gpus else 1,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle
                ),
            ).remote(self._cluster.device, self._config.cluster.threads)
            for bundle, share in enumerate(self._shares)
            for _ in range(share)
        ]
        self._actors = actors
        asked = [actor.describe.remote(self._config.cluster.interface) for actor in actors]
        try:
            infos = ray.get(asked, timeout=self._config.cluster.start_timeout)
        except GetTimeoutError as error:
            waited = self._config.cluster.start_timeout
            raise ClusterError(
                f"cluster.start_timeout={waited:g}: the {len(actors)} workers were not up in time; see `ray status` "
                "and the worker logs, or raise it"
            ) from error
        except RayError as error:
            raise ClusterError(f"a worker did not start: {last_line(error)}") from error
        order = sorted(range(len(actors)), key=lambda i: (infos[i]["node"], infos[i]["pid"]))
        self._actors = [actors[i] for i in order]
        self.infos = [{"rank": rank, **infos[i]} for rank, i in enumerate(order)]
        return self.infos

    def run(self, spec: WorkerSpec, handle: Callable[[dict[str, Any]], None], stop: threading.Event) -> str:
        """Let the workers train, passing on their records. Returns "done" or "stopped".

        Raises WorkerFailed naming the guilty rank, or the worker's own RaytrainError.
        """
        meeting = self._store.meeting(spec.generation)
        if self._readers and spec.blocks.groups:
            from raytrain_hpc.data.ray_feed import start_feeder  # not every run needs it

            self._feeder = start_feeder(spec.recipe, spec.blocks)
        runs = [actor.run.remote(spec, rank, meeting, self._feeder) for rank, actor in enumerate(self._actors)]
        left, told, fetched = list(runs), False, 0.0
        self._seen = [time.time()] * len(runs)
        while left:
            ready, left = ray.wait(left, num_returns=len(left), timeout=_HURRY_S if told else _LOOK_S)
            if any(self._failure(runs.index(run), run) is not None for run in ready):
                raise self._guilty(runs, handle, time.time())
            if stop.is_set() and not told:
                told = True
                for actor in self._actors:
                    actor.request_stop.remote()
            if time.monotonic() - fetched > (_HURRY_S if told else _LISTEN_S) or not left:
                fetched = time.monotonic()
                self._fetch(handle)
        outcome: str = ray.get(runs[0])
        return outcome

    def close(self) -> None:
        """End all actors and give their slots back."""
        for actor in [*self._actors, *([] if self._feeder is None else [self._feeder])]:
            ray.kill(actor, no_restart=True)  # readers end with the feeder, who owns them
        remove_placement_group(self._group)

    def _reserve(self, shares: list[int]) -> PlacementGroup:
        resource = "GPU" if self._cluster.device == "cuda" else "CPU"
        strategy = "STRICT_SPREAD" if len(shares) > 1 else "PACK"
        group: PlacementGroup = placement_group([{resource: share} for share in shares], strategy=strategy)
        self._shares = shares
        if not group.wait(self._config.cluster.start_timeout):
            remove_placement_group(group)
            raise ClusterError(
                f"cluster.start_timeout={self._config.cluster.start_timeout:g}: {sum(shares)} free {resource} slots "
                "did not turn up; other jobs hold them (see `ray status`)"
            )
        return group

    def _fetch(self, handle: Callable[[dict[str, Any]], None]) -> None:
        answers = [actor.drain.remote() for actor in self._actors]
        for rank, answer in enumerate(answers):
            try:
                records = ray.get(answer, timeout=_ANSWER_S)
            except GetTimeoutError as error:
                reason = f"gave no answer on its control path for {_ANSWER_S:g} s"
                raise self._failed(rank, "silent", reason) from error
            except RayError:
                continue  # its run call reports the death
            self._seen[rank] = time.time()
            for record in records:
                handle(record)

    def _failure(self, rank: int, run: Any) -> RaytrainError | None:
        try:
            ray.get(run)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RaytrainError):
                return cause
            return self._failed(rank, "raised", last_line(error))
        except RayError as error:
            return self._failed(rank, "died", last_line(error))
        return None

    def _guilty(self, runs: list[Any], handle: Callable[[dict[str, Any]], None], detected: float) -> RaytrainError:
        """Of all that failed, the one that began it: a dead process before an exception of its own before a
        collective that broke because its peer was gone."""
        seen = list(self._seen)
        ready, _ = ray.wait(runs, num_returns=len(runs), timeout=_SETTLE_S)
        failures = [failure for run in ready if (failure := self._failure(runs.index(run), run)) is not None]
        try:
            self._fetch(handle)
        except WorkerFailed as silent:
            failures.append(silent)
        guilty = min(failures, key=_innocence)
        if isinstance(guilty, WorkerFailed):
            guilty.detected, guilty.last_seen = detected, seen[guilty.rank]
        return guilty

    def _failed(self, rank: int, kind: str, reason: str) -> WorkerFailed:
        info = self.infos[rank]
        return WorkerFailed(
            rank, info["node"], info["pid"], kind, reason, detected=time.time(), last_seen=self._seen[rank]
        )


def last_line(error: BaseException) -> str:
    """The line of a Ray error that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _innocence(failure: RaytrainError) -> int:
    if not isinstance(failure, WorkerFailed):
        return 1
    if failure.kind != "raised":
        return 0 if failure.kind == "died" else 4
    peer_gone = any(word in failure.reason for word in ("gloo", "Connection closed by peer", "NCCL", "ECONNRESET"))
    return 3 if peer_gone else 2
