"""The settings that were left to the planner, chosen for the cluster that is there."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from math import gcd

from raytrain_hpc.driver.run_setup import PreparedRun
from raytrain_hpc.planner.explain import remedies, verdict, why
from raytrain_hpc.planner.hardware import Machine, machine
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.planner.measured_links import known, known_calibration
from raytrain_hpc.planner.search import Estimate, estimate, rank
from raytrain_hpc.planner.search_space import free_keys, settled
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.planner.workload import work_of

_UNKNOWN = "h100"  # what an accelerator of another name is taken to be


def choose(prepared: PreparedRun, world: int, cluster: Topology, line: Callable[[str], None]) -> PreparedRun:
    """The run with nothing left to choose for its `world` workers. `cluster`: their nodes.

    Raises LayoutError where no legal layout exists.
    """
    config = copy(prepared.config)
    accelerated = cluster.device == "cuda"
    free = dict(free_keys(config, accelerated=accelerated, whole_models=prepared.custom is not None))
    if prepared.stored is not None:  # how the batch is cut was settled when the run was first started
        free.pop("micro_batch", None)
        config.train = replace(config.train, micro_batch=prepared.stored.size)
    if not free:
        return prepared
    there = machine_of(world, cluster)
    best = rank(config, prepared.shape, there, known_calibration(there.device.name), free)[0]
    line(f"planned {', '.join(sorted(free))}: {verdict(best, there)}")
    line(f"        {best.step_s:.3g} s a step expected: {why(best, best, there)}")
    for remedy in () if best.fits else remedies(best, work_of(config, prepared.shape), there):
        line(f"        it may run out of memory; {remedy}")
    return replace(prepared, config=settled(config, best.choice))


def expected(prepared: PreparedRun, layout: Layout, batching: Batching, there: Machine) -> Estimate | None:
    """What to expect of this run on these devices; None of a module of the user's own."""
    if prepared.custom is not None:
        return None
    return estimate(prepared.config, prepared.shape, there, known_calibration(there.device.name), layout, batching)


def machine_of(world: int, cluster: Topology) -> Machine:
    """`world` workers as nodes of equal size: of uneven ones, as many a node as divides all."""
    per_node = world
    for node in cluster.nodes:
        per_node = gcd(per_node, node.slots) if node.slots < world else per_node
    name = cluster.device_name
    there = machine(name or _UNKNOWN, world // per_node, per_node, measured=known(name))
    if name:
        return there
    return replace(there, device=replace(there.device, name=f"device taken for an {_UNKNOWN}"))
