"""Choice of the backend that a run's workers run on: a Ray cluster or this process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.backend import ExecutionBackend
from raytrain_hpc.observability.console import Console
from raytrain_hpc.ray_address import check_address


@contextmanager
def open_backend(config: Config, console: Console, stop_event: threading.Event) -> Iterator[ExecutionBackend]:
    """Yield the backend for `config`: this process if cluster.workers=0, otherwise a Ray cluster.

    `console`: prints which cluster is used, and what is missing while nodes are waited for, until `stop_event` is set.
    """
    if config.cluster.workers == 0:
        from raytrain_hpc.driver.local_backend import LocalBackend

        yield LocalBackend(config)
    else:
        if not _is_ray_initialized():
            check_address(config)
        from raytrain_hpc.driver.cluster_backend import open_ray_backend  # cluster.workers=0 must work without Ray

        with open_ray_backend(config, console.print_line, stop_event, console.print_notice) as backend:
            yield backend


def _is_ray_initialized() -> bool:
    """Return whether this process is connected to Ray, without importing Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
