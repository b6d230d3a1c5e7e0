"""The settings that were left to the planner, chosen for the cluster that is there."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from math import gcd

from raytrain_hpc.driver.run_setup import PreparedRun
from raytrain_hpc.planner.explain import describe_fit, explain_estimate, suggest_remedies
from raytrain_hpc.planner.hardware import Machine, make_machine
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.planner.measured_links import load_calibration, load_links
from raytrain_hpc.planner.search import Estimate, estimate_layout, rank_layouts
from raytrain_hpc.planner.search_space import apply_choice, build_search_space
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.planner.workload import make_workload

_FALLBACK_DEVICE = "h100"  # what an accelerator of another name is taken to be


def resolve_auto_layout(
    prepared: PreparedRun, world: int, cluster: Topology, print_line: Callable[[str], None]
) -> PreparedRun:
    """The run with nothing left to choose for its `world` workers. `cluster`: their nodes.

    Raises LayoutError where no legal layout exists.
    """
    config = copy(prepared.config)
    accelerated = cluster.device == "cuda"
    free = dict(build_search_space(config, has_accelerator=accelerated, data_parallel_only=prepared.custom is not None))
    if prepared.stored_batching is not None:  # how the batch is cut was settled when the run was first started
        free.pop("micro_batch", None)
        config.train = replace(config.train, micro_batch=prepared.stored_batching.size)
    if not free:
        return prepared
    there = build_machine(world, cluster)
    best = rank_layouts(config, prepared.model_spec, there, load_calibration(there.device.name), free)[0]
    print_line(f"planned {', '.join(sorted(free))}: {describe_fit(best, there)}")
    print_line(f"        {best.step_s:.3g} s a step expected: {explain_estimate(best, best, there)}")
    for remedy in () if best.fits else suggest_remedies(best, make_workload(config, prepared.model_spec), there):
        print_line(f"        it may run out of memory; {remedy}")
    return replace(prepared, config=apply_choice(config, best.choice))


def estimate_run(prepared: PreparedRun, layout: Layout, batching: Batching, machine: Machine) -> Estimate | None:
    """What to expect of this run on these devices; None of a module of the user's own."""
    if prepared.custom is not None:
        return None
    return estimate_layout(
        prepared.config, prepared.model_spec, machine, load_calibration(machine.device.name), layout, batching
    )


def build_machine(world: int, cluster: Topology) -> Machine:
    """`world` workers as nodes of equal size: of uneven ones, as many a node as divides all."""
    per_node = world
    for node in cluster.nodes:
        per_node = gcd(per_node, node.slots) if node.slots < world else per_node
    name = cluster.device_name
    there = make_machine(name or _FALLBACK_DEVICE, world // per_node, per_node, measured=load_links(name))
    if name:
        return there
    return replace(there, device=replace(there.device, name=f"device taken for an {_FALLBACK_DEVICE}"))
