"""Copies of a state in host memory, at a moment between two steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from raytrain_hpc.state.holding import Held, Holding
from raytrain_hpc.state.index import Box


class Aside:
    """Memory that stays allocated from copy to copy, page-locked where the data is on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Box], torch.Tensor] = {}

    def copy(self, held: Iterable[Held]) -> Holding:
        """Copies of these slices, until the next call overwrites them. When this returns, the originals may change."""
        before, self._buffers = self._buffers, {}
        copies, devices = [], set()
        for one in held:
            buffer = before.get((one.name, one.box))
            if buffer is None or buffer.shape != one.tensor.shape or buffer.dtype != one.tensor.dtype:
                buffer = torch.empty(one.box.sizes, dtype=one.tensor.dtype, pin_memory=one.tensor.is_cuda)
            buffer.copy_(one.tensor, non_blocking=one.tensor.is_cuda)
            if one.tensor.is_cuda:
                devices.add(one.tensor.device)
            self._buffers[one.name, one.box] = buffer
            copies.append(Held(one.name, one.shape, one.dtype, one.box, buffer))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return Holding(copies)
