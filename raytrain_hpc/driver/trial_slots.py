"""Room for several runs at once: slots that are free on the Ray cluster or on this machine, and a Ray they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.planner.layout import get_fixed_world_size, get_min_world_size, get_model_parallel_size
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.ray_address import check_address


@dataclass(frozen=True)
class TrialSlots:
    """Slots for runs: GPUs, or CPUs where runs use none.

    `count` returns how many a run takes. `words` and `environment` make a run connect to the Ray that was started for
    all of them.
    """

    free: int
    count: Callable[[Config], int]
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def open_trial_slots(config: Config, at_once: int) -> Iterator[TrialSlots]:
    """Yield the free slots for runs that differ little from `config`.

    They are those of the running Ray cluster. Without one, Ray is started here for all runs, for the duration of the
    context, with CPUs for at least `at_once` of them: each run would otherwise start its own, with an object store of
    its own. Runs in one process (cluster.workers=0) need no Ray.
    """
    if config.cluster.workers == 0:
        yield _count_local_slots(config)
        return
    import ray

    from raytrain_hpc.driver.ray_cluster import connect_ray
    from raytrain_hpc.driver.ray_topology import DEFAULT_CPU_WORKERS, read_topology

    if not ray.is_initialized():
        check_address(config)
    num_workers = get_fixed_world_size(config) or max(DEFAULT_CPU_WORKERS, get_model_parallel_size(config))
    with ExitStack() as connection:
        started = connection.enter_context(connect_ray(config, (num_workers + config.cluster.spares) * at_once))
        topology = read_topology(config)
        if not started:
            resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
            free = int(resources.get(topology.ray_resource, 0))
            connection.close()  # the runs have connections of their own
            yield TrialSlots(free, partial(count_slots, topology=topology, has_readers=True))
            return
        free = topology.total_slots if topology.device == "cuda" else count_usable_cpus()
        # As for a Ray that a run starts for itself: no readers of Ray Data, which would need CPUs besides.
        words = ("cluster.address=auto", *(("data.engine=local",) if config.data.engine == AUTO else ()))
        address = ray.get_runtime_context().gcs_address
        count = partial(count_slots, topology=topology, has_readers=config.data.engine == "ray")
        yield TrialSlots(free, count, words, {"RAY_ADDRESS": address})


def count_slots(config: Config, *, topology: Topology, has_readers: bool) -> int:
    """Return the slots that a run takes: one per worker; on CPU, one per thread, and one if Ray Data reads for it."""
    from raytrain_hpc.driver.ray_topology import resolve_world_size

    workers = resolve_world_size(config, topology) + config.cluster.spares
    if topology.device == "cuda":
        return workers
    return workers * config.cluster.cpu_threads + int(has_readers and config.data.engine != "local")


def _count_local_slots(config: Config) -> TrialSlots:
    """Return the slots of runs without Ray. On a GPU there is one: all of them would use the first GPU."""
    if config.cluster.device != "cpu":
        import torch

        if torch.cuda.is_available():
            return TrialSlots(1, lambda trial: 1)
    return TrialSlots(count_usable_cpus(), lambda trial: trial.cluster.cpu_threads * get_min_world_size(trial))
