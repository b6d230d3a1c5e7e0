"""Connection of a run to the coordinator of the runs on its cluster: reports what it holds, receives its allowance."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.autoscaler import count_wanted_workers
from raytrain_hpc.driver.cluster_monitor import ClusterSnapshot
from raytrain_hpc.driver.ray_topology import is_sized_by_cpus
from raytrain_hpc.driver.run_coordinator import RunCoordinator
from raytrain_hpc.elastic.cluster_following import get_max_workers
from raytrain_hpc.elastic.device_allocation import UNLIMITED, Allowance, DeviceClaim
from raytrain_hpc.elastic.recovery import get_min_workers
from raytrain_hpc.planner.layout import get_model_parallel_size

_log = logging.getLogger(__name__)
NAME, NAMESPACE = "run-coordinator-1", "raytrain-hpc"  # the number changes with the form of claims
_FIRST_REPLY_TIMEOUT_S = 3.0
_REPLY_TIME_S = 0.1  # a later reply is received by the next report
_LEAVE_TIMEOUT_S = 2.0
_MAX_RETRY_DELAY_S = 60.0

CoordinatorActor = ray.remote(num_cpus=0, max_restarts=0)(RunCoordinator)


def build_claim(
    config: Config,
    snapshot: ClusterSnapshot,
    *,
    run_id: str,
    since: float,
    held: int | None,
    target: int = 0,
    wanted: int | None = None,
) -> DeviceClaim:
    """Return the claim of a run.

    `held`: slots that it has reserved; None before it has. `target`: as in `count_wanted_workers`. `wanted`: workers
    that it would have on a cluster of its own, besides spares; None: not known yet.
    """
    spares, minimum, maximum = config.cluster.spares, get_min_workers(config), get_max_workers(config)
    num_fixed, is_started = snapshot.fixed_workers, held is not None
    if not is_started and config.cluster.min_workers == AUTO:  # it starts with all that it wants, spares included
        minimum = (num_fixed or minimum) + spares
    if is_started and num_fixed is not None:  # it does not shrink
        minimum = max(minimum, held or 0)
    most = wanted or num_fixed or maximum
    return DeviceClaim(
        run_id=run_id,
        name=config.run.name,
        priority=config.cluster.priority,
        since=since,
        minimum=minimum,
        maximum=None if most is None else max(minimum, most + spares),
        held=held or 0,
        is_started=is_started,
        group_size=get_model_parallel_size(config) if num_fixed is None else 1,
        spares=spares,
        requested=count_wanted_workers(config, target) + spares,
        group_size_per_node=config.parallel.tp,
        unit=int(config.cluster.cpus_per_worker) if snapshot.resource == "CPU" and is_sized_by_cpus(config) else 1,
        resource=snapshot.resource,
        total=sum(node.slots for node in snapshot.nodes),
        free=sum(node.free for node in snapshot.nodes),
    )


class CoordinatorClient:
    """The run's side. `report` is called by the thread of the cluster monitor, the rest by the driver's.

    While the coordinator does not answer, the last allowance stays.
    """

    def __init__(self, config: Config):
        self._config = config
        self._run_id, self._since = secrets.token_hex(8), time.time()
        self._target = 0
        self._wanted: int | None = None
        self._count_held: Callable[[], int] | None = None
        self._actor: Any = None
        self._reply: Any = None
        self._retry_at, self._retry_delay_s = 0.0, 0.0
        self._is_known, self._has_left = threading.Event(), False
        self._lock = threading.Lock()  # no report arrives after the run has left
        self._allowance = UNLIMITED

    def get_allowance(self) -> Allowance:
        """Return the devices that the run may hold beside other runs, as last received."""
        return self._allowance

    def wait_until_known(self) -> None:
        """Wait for the first allowance, up to 3 s. Call after the first report."""
        self._is_known.wait(_FIRST_REPLY_TIMEOUT_S)

    def begin(self, config: Config, count_held: Callable[[], int]) -> None:
        """Count the slots that the run has reserved by now with `count_held`. `config`: its resolved settings."""
        self._config, self._count_held = config, count_held

    def set_target(self, target: int, wanted: int | None) -> None:
        """Set the workers that the run should have, and those that it would have on a cluster of its own."""
        self._target, self._wanted = target, wanted

    def report(self, snapshot: ClusterSnapshot) -> None:
        """Receive the reply to the last report, if it has come, and send the next one. Starts a missing coordinator."""
        if time.monotonic() < self._retry_at:
            return
        try:
            if self._reply is None:
                with self._lock:
                    self._send(snapshot)
            self._receive()
            return
        except ActorDiedError:
            _log.info("the coordinator of the runs on this cluster has ended; another one is started")
        except (RayError, RuntimeError, OSError) as error:
            _log.warning("the coordinator of the runs on this cluster cannot be reached: %s", error)
        self._actor, self._reply = None, None
        self._retry_at = time.monotonic() + self._retry_delay_s
        self._retry_delay_s = min(_MAX_RETRY_DELAY_S, 2 * self._retry_delay_s + 1.0)

    def leave(self) -> None:
        """Withdraw the claim, so that other runs get the devices at once. Call when the slots are released."""
        with self._lock:
            actor, has_left, self._has_left = self._actor, self._has_left, True
        if has_left or actor is None:
            return
        try:
            ray.get(actor.leave.remote(self._run_id), timeout=_LEAVE_TIMEOUT_S)
        except RayError as error:  # the claim expires
            _log.info("the coordinator of the runs on this cluster did not confirm the end of this run: %s", error)

    def _send(self, snapshot: ClusterSnapshot) -> None:
        if self._has_left:
            return
        if self._actor is None:
            self._connect()
        held = None if self._count_held is None else self._count_held()
        claim = build_claim(
            self._config,
            snapshot,
            run_id=self._run_id,
            since=self._since,
            held=held,
            target=self._target,
            wanted=self._wanted,
        )
        self._reply = self._actor.report.remote(claim)

    def _connect(self) -> None:
        try:
            self._actor = ray.get_actor(NAME, NAMESPACE)
        except ValueError:  # there is none: this run is the first one, and has nothing to wait for
            self._actor = CoordinatorActor.options(  # type: ignore[attr-defined]
                name=NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
            ).remote()
            self._is_known.set()

    def _receive(self) -> None:
        """Keep the allowance if the reply comes within the usual time. Raises RayError if the coordinator has ended."""
        if self._reply is None or not ray.wait([self._reply], timeout=_REPLY_TIME_S)[0]:
            return
        reply, self._reply = self._reply, None
        allowance: Allowance | None = ray.get(reply)
        self._retry_delay_s = 0.0
        if allowance is not None:
            self._allowance = allowance
            self._is_known.set()
