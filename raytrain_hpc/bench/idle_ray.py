"""An idle Ray cluster during both sides of a comparison, so that both share the machine with Ray's processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from raytrain_hpc.bench.contenders import scratch_dir


@contextmanager
def idle_ray(cpus: int) -> Iterator[str]:
    """Start Ray with `cpus` CPU slots and yield its address."""
    import ray

    from raytrain_hpc.ray_address import hide_auth_notice

    with scratch_dir() as directory:
        with hide_auth_notice():
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                logging_level=logging.WARNING,
                _temp_dir=str(directory),
            )
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()
