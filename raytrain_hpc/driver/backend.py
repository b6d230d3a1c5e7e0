"""Where workers live: a fleet gives a run its crew of workers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from raytrain_hpc.config.schema import Config
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.ray_address import check_address
from raytrain_hpc.runtime.worker_spec import WorkerSpec

RegroupRequest = Literal["pause", "save", None]  # to form another generation: from memory, or from a checkpoint as well


class WorkerGroup(Protocol):
    """The workers of a run, from which its generations are formed."""

    def start(self) -> None:
        """Start them. Raises ClusterError where they do not come up."""

    def wait_for_workers(self, count: int) -> None:
        """Wait until `count` are up. Raises ClusterError where they do not come."""

    def scale_up_to(self, count: int) -> None:
        """Have `count` workers: those that are missing come up behind what runs."""

    def list_candidates(self) -> list[Candidate]:
        """Who can be given a rank now."""

    def set_members(self, members: tuple[int, ...]) -> list[dict[str, Any]]:
        """Number the ranks of the next generation. Returns who and where each is."""

    def run_generation(
        self,
        spec: WorkerSpec,
        on_record: Callable[[dict[str, Any]], None],
        stop_event: threading.Event,
        poll_regroup: Callable[[], RegroupRequest],
    ) -> str:
        """One generation, its records handled. Returns how it ended: "paused", or "stopped" where its state was to be
        saved, if `regroup` asked for another one.

        Raises WorkerFailed; those that are left are candidates then.
        """

    def recall_metrics(self, after_step: int, until_step: int) -> list[dict[str, Any]]:
        """The metrics of steps after the one and up to the other that workers remember."""

    def discard_state(self) -> None:
        """What workers hold in memory is of no use."""

    def close(self) -> None:
        """End them."""


class ExecutionBackend(Protocol):
    """A home for `world` workers on the nodes of a cluster, or in this process."""

    world: int
    cluster: Topology
    is_external: bool  # whether it is a Ray cluster that outlives the run, and may have a dashboard

    def create_worker_group(self, config: Config) -> WorkerGroup:
        """A crew for these settings, not started."""


@contextmanager
def open_backend(config: Config) -> Iterator[ExecutionBackend]:
    """This process where cluster.workers=0, else a Ray cluster."""
    if config.cluster.workers == 0:
        from raytrain_hpc.driver.local_backend import LocalBackend

        yield LocalBackend(config)
    else:
        if not _is_ray_initialized():
            check_address(config)
        from raytrain_hpc.driver.ray_backend import open_ray_backend  # a machine without Ray never comes here

        with open_ray_backend(config) as fleet:
            yield fleet


def _is_ray_initialized() -> bool:
    """Whether this process is connected to Ray already; asks without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
