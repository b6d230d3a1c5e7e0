"""Layers and parameters of pipeline ranks, remembered: a search asks for the same ones again and again."""

from __future__ import annotations

from functools import cache

from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.model_state_memory import RankParameters, parameters_by_stage
from raytrain_hpc.planner.pipeline_schedule import Name
from raytrain_hpc.planner.stage_split import split_layers
from raytrain_hpc.planner.workload import Work


class Shares:
    """What each pipeline rank has of this work's model."""

    def __init__(self, work: Work):
        self._work = work
        self._cached_layers, self._cached_parameters = cache(self._layers), cache(self._parameters)

    def layers(self, stages: int) -> list[int]:
        """Layers of each of so many stages."""
        return self._cached_layers(stages)

    def parameters(self, layout: Layout) -> list[RankParameters]:
        """Of a rank of each pipeline coordinate, before ZeRO: data-parallel axes do not count."""
        return self._cached_parameters(layout.tp, layout.pp, layout.ep, layout.schedule, layout.virtual_stages)

    def _layers(self, stages: int) -> list[int]:
        return [len(layers) for layers in split_layers(self._work.shape, self._work.seq_len, stages)]

    def _parameters(self, tp: int, pp: int, ep: int, schedule: Name, virtual: int) -> list[RankParameters]:
        layout = Layout(dp_replicate=ep, tp=tp, pp=pp, ep=ep, schedule=schedule, virtual_stages=virtual)
        return parameters_by_stage(self._work.shape, layout, self._work.seq_len)
