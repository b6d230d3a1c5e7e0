"""Cache of layer and parameter counts per pipeline stage, which a layout search needs repeatedly."""

from __future__ import annotations

from functools import cache

from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.model_state_memory import RankParameters, count_parameters_by_pp_rank
from raytrain_hpc.planner.pipeline_schedule import ScheduleName
from raytrain_hpc.planner.stage_split import split_layers
from raytrain_hpc.planner.workload import Workload


class StageCache:
    """Cached layer and parameter counts of the stages of one workload's model."""

    def __init__(self, workload: Workload):
        self._workload = workload
        self._get_layer_counts, self._get_parameters = cache(self._count_layers), cache(self._count_parameters)

    def get_layer_counts(self, num_stages: int) -> list[int]:
        """Return the number of layers of each stage."""
        return self._get_layer_counts(num_stages)

    def get_parameters(self, layout: Layout) -> list[RankParameters]:
        """Return the parameters of a rank for each pipeline coordinate, before ZeRO. Data axes do not matter."""
        return self._get_parameters(layout.tp, layout.pp, layout.ep, layout.schedule, layout.virtual_stages)

    def _count_layers(self, num_stages: int) -> list[int]:
        return [len(layers) for layers in split_layers(self._workload.spec, self._workload.seq_len, num_stages)]

    def _count_parameters(
        self, tp: int, pp: int, ep: int, schedule: ScheduleName, virtual_stages: int
    ) -> list[RankParameters]:
        layout = Layout(dp_replicate=ep, tp=tp, pp=pp, ep=ep, schedule=schedule, virtual_stages=virtual_stages)
        return count_parameters_by_pp_rank(self._workload.spec, layout, self._workload.seq_len)
