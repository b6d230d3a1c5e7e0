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

Wish = Literal["pause", "save", None]  # to form another generation: from memory, or from a checkpoint as well


class Crew(Protocol):
    """The workers of a run, from which its generations are formed."""

    def start(self) -> None:
        """Start them. Raises ClusterError where they do not come up."""

    def wait(self, count: int) -> None:
        """Wait until `count` are up. Raises ClusterError where they do not come."""

    def extend(self, count: int) -> None:
        """Have `count` workers: those that are missing come up behind what runs."""

    def candidates(self) -> list[Candidate]:
        """Who can be given a rank now."""

    def arrange(self, members: tuple[int, ...]) -> list[dict[str, Any]]:
        """Number the ranks of the next generation. Returns who and where each is."""

    def run(
        self,
        spec: WorkerSpec,
        handle: Callable[[dict[str, Any]], None],
        stop: threading.Event,
        regroup: Callable[[], Wish],
    ) -> str:
        """One generation, its records handled. Returns how it ended: "paused", or "stopped" where its state was to be
        saved, if `regroup` asked for another one.

        Raises WorkerFailed; those that are left are candidates then.
        """

    def recall(self, after: int, until: int) -> list[dict[str, Any]]:
        """The metrics of steps after the one and up to the other that workers remember."""

    def forget(self) -> None:
        """What workers hold in memory is of no use."""

    def close(self) -> None:
        """End them."""


class Fleet(Protocol):
    """A home for `world` workers on the nodes of a cluster, or in this process."""

    world: int
    cluster: Topology
    lasting: bool  # whether it is a Ray cluster that outlives the run, and may have a dashboard

    def crew(self, config: Config) -> Crew:
        """A crew for these settings, not started."""


@contextmanager
def open_fleet(config: Config) -> Iterator[Fleet]:
    """This process where cluster.workers=0, else a Ray cluster."""
    if config.cluster.workers == 0:
        from raytrain_hpc.driver.local_backend import LocalFleet

        yield LocalFleet(config)
    else:
        if not _connected():
            check_address(config)
        from raytrain_hpc.driver.ray_backend import open_ray_fleet  # a machine without Ray never comes here

        with open_ray_fleet(config) as fleet:
            yield fleet


def _connected() -> bool:
    """Whether this process is connected to Ray already; asks without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
