"""Running statistics of a user's module: buffers that forward passes change, differently on each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.training.module_tensors import broadcast_bytes


class RunningStatistics:
    """Buffers of a module, kept equal on all ranks.

    They become those of rank 0, or, if a step is not applied, those of its start. With `is_elastic`, every microbatch
    of a step starts from the buffers of the start of the step, and they become those after its first microbatch: the
    same on any number of ranks. `audited`: those that are part of the state, by name.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        *,
        is_elastic: bool = False,
        audited: Mapping[str, Tensor] | None = None,
    ):
        self.buffers, self._group, self._is_elastic, self._audited = buffers, group, is_elastic, audited or {}
        self._initial: list[Tensor] | None = None  # at the start of the step
        self._updated: list[Tensor] = []  # after the first microbatch of the step

    def pre_microbatch(self) -> None:
        """Keep the buffers of the start of the step, or restore them if elastic. Call before each forward pass."""
        if self._initial is None:
            self._initial = [buffer.clone() for buffer in self.buffers]
        elif self._is_elastic:
            _copy(self._initial, self.buffers)

    def undo_step(self) -> None:
        """Restore the buffers of the start of the step, whose passes are repeated or not applied."""
        if self._initial is not None:
            _copy(self._initial, self.buffers)
        self._initial, self._updated = None, []

    def post_microbatch(self, index: int) -> None:
        """Keep the buffers after the first microbatch. `index`: of the microbatch among those of this rank.

        Rank 0 has the first microbatch of the step.
        """
        if self._is_elastic and index == 0:
            self._updated = [buffer.clone() for buffer in self.buffers]

    def trace(self, tracer: ComputationTracer) -> None:
        """Trace the buffers after the passes of a microbatch, if the microbatch is traced. Call before the next one."""
        for name, buffer in self._audited.items():
            tracer.add("contributed", f"buffer {name}", buffer)

    def sync(self) -> None:
        """Give the buffers their values at the end of a step. Collective. Call after the backward passes."""
        _copy(self._updated, self.buffers)
        self._initial, self._updated = None, []
        if self._group is not None:
            for buffer in self.buffers:
                broadcast_bytes(buffer, self._group)


def _copy(values: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=False):  # nothing is copied without values
        buffer.copy_(value)
