"""Memory that a spare needs to audit: whole weights and gradients of a model that ranks may have sharded."""

from __future__ import annotations

from dataclasses import replace

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.elastic.spare_audit_schedule import choose_spare_interval, get_unit_layout
from raytrain_hpc.planner.hardware import Device
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.planner.memory_model import MemoryFootprint, MemoryModel
from raytrain_hpc.planner.workload import make_choice, make_workload


def estimate_spare_footprint(config: Config, spec: ModelSpec, layout: Layout, batching: Batching) -> MemoryFootprint:
    """Estimate the footprint of a spare that computes a microbatch of ranks in `layout` again: without moments."""
    unit = get_unit_layout(config, layout)
    workload = replace(make_workload(config, spec), audited=False, elastic=False)
    choice = make_choice(config, unit, Batching(unit.dp_size, batching.size))
    return replace(MemoryModel(workload).estimate_footprint(choice), moments=0)


def explain_too_large_audits(
    config: Config, spec: ModelSpec, layout: Layout, batching: Batching, device: Device
) -> str | None:
    """Return why spares are not likely to have the memory for their audits; None if they have it, or audit nothing."""
    if not choose_spare_interval(config):
        return None
    required_gib = estimate_spare_footprint(config, spec, layout, batching).compute_required_gib(device)
    if required_gib <= device.memory_gib:
        return None
    spares = get_unit_layout(config, layout).world_size
    unit = "a spare" if spares == 1 else f"each of {spares} spares"
    return (
        f"audits by spares may run out of memory: {unit} needs about {required_gib:.0f} GiB for whole weights and "
        f"gradients, and the device has {device.memory_gib:.0f}; fault.spare_audit_interval=0 leaves audits to ranks"
    )
