"""Where workers live: a fleet gives one crew of workers a generation."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from raytrain_hpc.address import check_address
from raytrain_hpc.config import Config
from raytrain_hpc.worker.spec import WorkerSpec


class Crew(Protocol):
    """The workers of one generation."""

    def start(self) -> list[dict[str, Any]]:
        """Start them; who and where each rank is."""

    def run(self, spec: WorkerSpec, handle: Callable[[dict[str, Any]], None], stop: threading.Event) -> str:
        """Let them train, handling their records. Returns "done" or "stopped"; raises WorkerFailed."""

    def close(self) -> None:
        """End them."""


class Fleet(Protocol):
    """A home for crews of `world` workers."""

    world: int

    def crew(self) -> Crew:
        """A fresh crew, not started."""


@contextmanager
def open_fleet(config: Config) -> Iterator[Fleet]:
    """This process where cluster.workers=0, else a Ray cluster."""
    if config.cluster.workers == 0:
        from raytrain_hpc.driver.local import LocalFleet

        yield LocalFleet(config)
    else:
        if not _connected():
            check_address(config)
        from raytrain_hpc.driver.workers import open_ray_fleet  # a machine without Ray never comes here

        with open_ray_fleet(config) as fleet:
            yield fleet


def _connected() -> bool:
    """Whether this process is connected to Ray already; asks without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
