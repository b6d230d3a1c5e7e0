"""Copies of a state in host memory, at a moment between two steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from raytrain_hpc.state.holding import TORCH_DTYPES, Held, Holding
from raytrain_hpc.state.index import ITEM_BYTES, StateIndex

_ALIGNED = 64  # bytes: where any dtype may begin


class Aside:
    """One block of memory, which stays allocated from copy to copy; page-locked where the data is on a GPU.

    `block`: all of it as bytes. Two ranks with room for the same index have blocks of the same form.
    """

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)
        self._index, self._room = StateIndex(), Holding()

    def room(self, index: StateIndex, *, pinned: bool = False) -> Holding:
        """Memory for what this index says, holding anything. For the same index it is the same memory."""
        if index != self._index:
            begins, size = [], 0
            boxes = [(tensor, box) for tensor in index.values() for box in tensor.boxes]
            for tensor, box in boxes:
                begins.append(size)
                size += -(-box.numel * ITEM_BYTES[tensor.dtype] // _ALIGNED) * _ALIGNED
            self.block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            held = []
            for (tensor, box), begin in zip(boxes, begins, strict=True):
                part = self.block[begin : begin + box.numel * ITEM_BYTES[tensor.dtype]]
                view = part.view(TORCH_DTYPES[tensor.dtype]).view(box.sizes)
                held.append(Held(tensor.name, tensor.shape, tensor.dtype, box, view))
            self._index, self._room = index, Holding(held)
        return self._room

    def copy(self, held: Iterable[Held]) -> Holding:
        """Copies of these slices, until the next call overwrites them. When this returns, the originals may change."""
        originals = held if isinstance(held, Holding) else Holding(held)
        index = originals.index()
        room = self.room(index, pinned=any(one.tensor.is_cuda for one in originals))
        devices = set()
        for name, tensor in index.items():
            for number in range(len(tensor.boxes)):
                original = originals.at(name, number).tensor
                room.at(name, number).tensor.copy_(original, non_blocking=original.is_cuda)
                if original.is_cuda:
                    devices.add(original.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return room
