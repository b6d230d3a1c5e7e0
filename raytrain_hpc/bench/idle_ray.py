"""An idle Ray cluster during both sides of a comparison, so that both share the machine with Ray's processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raytrain_hpc.bench.contenders import scratch_dir


@contextmanager
def idle_ray(cpus: int) -> Iterator[str]:
    """Start Ray with `cpus` CPU slots and yield its address."""
    import ray

    from raytrain_hpc.ray_private import start_local_ray

    with scratch_dir() as directory:
        start_local_ray(directory, num_cpus=cpus)
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()
