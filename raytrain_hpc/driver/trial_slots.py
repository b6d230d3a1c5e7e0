"""Room for several runs at once: slots that are free on the Ray cluster or this machine, and the Ray of the runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.planner.layout import get_fixed_world_size, get_min_world_size, get_model_parallel_size
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.ray_private import get_auth_environment


@dataclass(frozen=True)
class TrialSlots:
    """Slots for runs: GPUs, or CPUs where runs use none; `resource`: which of them.

    `count` returns how many a run takes. `words` and `environment` make a run connect to the Ray of all of them. If it
    was started for them, it runs until all processes that hold `held_descriptors` have ended.
    """

    free: int
    count: Callable[[Config], int]
    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ray_started: bool = False
    held_descriptors: tuple[int, ...] = ()
    resource: str = "CPU"


@contextmanager
def connect_trial_slots(config: Config, at_once: int) -> Iterator[TrialSlots]:
    """Connect to Ray within the context, or start it, and yield its slots."""
    import ray

    from raytrain_hpc.driver.ray_cluster import connect_ray
    from raytrain_hpc.driver.ray_topology import DEFAULT_CPU_WORKERS, read_topology

    is_shared = ray.is_initialized()  # by the caller of this process; the runs use the same
    num_workers = get_fixed_world_size(config) or max(DEFAULT_CPU_WORKERS, get_model_parallel_size(config))
    with connect_ray(config, (num_workers + config.cluster.spares) * at_once) as started:
        topology = read_topology(config)
        words: tuple[str, ...] = ("cluster.address=auto",)
        environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **get_auth_environment()}
        if not started:
            resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
            free = int(resources.get(topology.ray_resource, 0))
            count = partial(count_slots, topology=topology, has_readers=True)
            slots = TrialSlots(free, count, resource=topology.ray_resource)
            yield replace(slots, words=words, environment=environment) if is_shared else slots
            return
        free = topology.total_slots if topology.has_accelerators else count_usable_cpus()
        # As for a Ray that a run starts for itself: no readers of Ray Data, which would need CPUs besides.
        words += ("data.engine=local",) if config.data.engine == AUTO else ()
        count = partial(count_slots, topology=topology, has_readers=config.data.engine == "ray")
        yield TrialSlots(free, count, words, environment, is_ray_started=True, resource=topology.ray_resource)


def count_slots(config: Config, *, topology: Topology, has_readers: bool) -> int:
    """Return the slots that a run takes: one per worker; on CPU, one per thread, and one if Ray Data reads for it."""
    from raytrain_hpc.driver.ray_topology import resolve_world_size

    workers = resolve_world_size(config, topology) + config.cluster.spares
    if topology.has_accelerators:
        return workers
    return workers * config.cluster.cpu_threads + int(has_readers and config.data.engine != "local")


def count_local_slots(config: Config) -> TrialSlots:
    """Return the slots of runs without Ray. On a GPU there is one: all of them would use the first GPU."""
    if config.cluster.device != "cpu":
        from raytrain_hpc.torch_device import find_accelerator

        if find_accelerator() is not None:
            return TrialSlots(1, lambda trial: 1, resource="GPU")
    return TrialSlots(count_usable_cpus(), lambda trial: trial.cluster.cpu_threads * get_min_world_size(trial))
