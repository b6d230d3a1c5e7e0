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
from raytrain_hpc.elastic.state_partition import State
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.placement import node_shares
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.worker.actor import WorkerActor

_log = logging.getLogger(__name__)
_TRIES = 3  # to start one in the place of another, in a row
_LET_GO_ON_S = 1.0  # a start takes a CPU for seconds: those that are left come first

Info = dict[str, Any]


Slot = tuple[PlacementGroup, int]  # and which of its bundles


@dataclass(eq=False)
class Worker:
    """One actor. `info` says who and where it is, once it is up; `held` what it had in memory when it last ended."""

    number: int
    actor: Any
    slot: Slot
    described: Any
    info: Info = field(default_factory=dict)
    held: tuple[State, ...] = ()
    pace: float = 1.0  # how many times as long as others it was seen to work for a step


class Actors:
    """An actor a slot, in node-shaped bundles. One that ends is followed by another in its slot."""

    def __init__(self, config: Config, count: int, cluster: Topology, kind: Any = WorkerActor):
        """Raises ClusterError where `count` slots are not free within cluster.start_timeout. `kind`: a Ray actor."""
        self._coming: list[Worker] = []
        self._vacant: list[tuple[float, Slot]] = []  # since when
        self.up: list[Worker] = []
        self._started, self._futile, self._begun = 0, 0, False
        self._config, self._cluster, self._kind = config, cluster, kind
        self.rehearsed: WorkerSpec | None = None  # what those who come up behind a run are warmed up with
        self._groups: list[PlacementGroup] = []
        shares = node_shares(count, cluster, config.parallel.tp)
        # Without racks one node is as good as another, and Ray knows best which are free.
        self._slots = self._reserve(list(shares.values()), list(shares) if cluster.racked else ())
        if not self._groups[0].wait(config.cluster.start_timeout):
            self.close()
            raise ClusterError(
                f"cluster.start_timeout={config.cluster.start_timeout:g}: {count} free {cluster.resource} slots did "
                "not turn up; other jobs hold them (see `ray status`)"
            )

    def start(self) -> None:
        """Start all and learn where each is. Raises ClusterError past cluster.start_timeout."""
        for slot in self._slots:
            self._start(slot)
        self.wait(len(self._slots))
        self._begun = True

    @property
    def nodes(self) -> set[str]:
        """Where slots are."""
        tables = [placement_group_table(group) for group in self._groups]  # type: ignore[no-untyped-call]
        return {node for table in tables for node in table["bundles_to_node_id"].values() if node}

    def extend(self, count: int) -> None:
        """Have `count` slots in all. What is missing comes up behind what runs, as soon as the cluster has room."""
        together = self._config.parallel.tp
        missing = max(0, count - len(self._slots))
        for slot in self._reserve([together] * (missing // together) + [1] * (missing % together)):
            self._slots.append(slot)
            self._start(slot)

    def wait(self, count: int) -> None:
        """Wait until `count` are up. Raises ClusterError past cluster.start_timeout."""
        self._fill(time.monotonic())
        timeout = self._config.cluster.start_timeout
        missing = count - len(self.up)
        described = [worker.described for worker in self._coming]
        ready, _ = ray.wait(described, num_returns=min(missing, len(described)), timeout=timeout)
        self._welcome(ready)
        if len(self.up) < count:
            raise ClusterError(
                f"cluster.start_timeout={timeout:g}: only {len(self.up)} of {count} workers were up in time; see "
                "`ray status` and the worker logs, or raise it"
            )

    def arrived(self) -> bool:
        """Whether any came up since the last look, all of which are now in `up`."""
        self._fill(time.monotonic() - _LET_GO_ON_S)
        if not self._coming:
            return False
        described = [worker.described for worker in self._coming]
        ready, _ = ray.wait(described, num_returns=len(described), timeout=0)
        before = len(self.up)
        self._welcome(ready)
        return len(self.up) > before

    def replace(self, worker: Worker) -> None:
        """Have done with one, whatever state it is in. Another one comes up in its slot, behind what runs."""
        if worker in self.up:
            self.up.remove(worker)
            ray.kill(worker.actor, no_restart=True)
            self._vacant.append((time.monotonic(), worker.slot))

    def replace_all_on(self, node: str) -> None:
        """The same for all on a node that is gone."""
        for worker in [one for one in self.up if one.info["node"] == node]:
            self.replace(worker)

    def _fill(self, before: float) -> None:
        """Start a worker in every slot that has been vacant since before this moment."""
        due = [slot for since, slot in self._vacant if since <= before]
        self._vacant = [(since, slot) for since, slot in self._vacant if since > before]
        for slot in due:
            self._start(slot)

    def close(self) -> None:
        """End all and give their slots back."""
        for worker in [*self.up, *self._coming]:
            ray.kill(worker.actor, no_restart=True)
        for group in self._groups:
            remove_placement_group(group)

    def _reserve(self, shares: Sequence[int], nodes: Sequence[str] = ()) -> list[Slot]:
        """A node-shaped bundle a share; those of a first reservation on as many nodes, on these if any are named."""
        if not shares:
            return []
        strategy = "PACK" if self._groups or len(shares) == 1 else "STRICT_SPREAD"
        group = placement_group(
            [{self._cluster.resource: share} for share in shares],
            strategy=strategy,
            bundle_label_selector=[{"ray.io/node-id": node} for node in nodes] or None,
        )
        self._groups.append(group)
        return [(group, bundle) for bundle, share in enumerate(shares) for _ in range(share)]

    def _start(self, slot: Slot) -> None:
        gpus = 1 if self._cluster.device == "cuda" else 0
        actor = self._kind.options(
            num_cpus=0 if gpus else 1,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=slot[0], placement_group_bundle_index=slot[1]
            ),
        ).remote(self._cluster.device, self._config.cluster.threads)
        described = actor.describe.remote(self._config, self.rehearsed)
        self._coming.append(Worker(self._started, actor, slot, described))
        self._started += 1

    def _welcome(self, ready: list[Any]) -> None:
        for worker in [worker for worker in self._coming if worker.described in ready]:
            self._coming.remove(worker)
            try:
                worker.info = ray.get(worker.described)
            except RayError as error:
                if not self._begun:
                    raise ClusterError(f"a worker did not start: {last_line(error)}") from error
                self._futile += 1
                _log.warning("a worker did not come up behind the run: %s", last_line(error))
                if self._futile <= _TRIES:  # then the run goes on without it
                    self._start(worker.slot)
                continue
            self._futile = 0
            self.up.append(worker)


def last_line(error: BaseException) -> str:
    """The line of a Ray error that says what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
