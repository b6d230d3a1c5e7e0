"""Most microbatches of each stage in flight, from the loads that the planner uses."""

from __future__ import annotations

from raytrain_hpc.planner.pipeline_schedule import PipelineOrder
from raytrain_hpc.planner.pipeline_timeline import list_peak_loads


def count_max_in_flight(order: PipelineOrder) -> dict[int, int]:
    """Return, for each stage, the most microbatches whose activations a rank holds at once."""
    loads = list_peak_loads(order)
    return {stage: max(load[stage].in_flight for load in loads) for stage in loads[0]}
