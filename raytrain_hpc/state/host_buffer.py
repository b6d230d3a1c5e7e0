"""Copies of a state in host memory, at a moment between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from raytrain_hpc.state.shard_index import ITEM_BYTES, Box, StateIndex, TensorSlices
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, Held, Holding

_ALIGNED = 64  # bytes: where any dtype may begin


def block_bytes(index: StateIndex) -> int:
    """Bytes of a block with room for what this index says."""
    return sum(_room(tensor, box) for tensor, box in _slices(index))


def laid_out(block: torch.Tensor, index: StateIndex) -> Holding:
    """The slices of an index in a block of bytes, one after the other: the same in every process."""
    held, begin = [], 0
    for tensor, box in _slices(index):
        part = block[begin : begin + box.numel * ITEM_BYTES[tensor.dtype]]
        view = part.view(TORCH_DTYPES[tensor.dtype]).view(box.sizes)
        held.append(Held(tensor.name, tensor.shape, tensor.dtype, box, view))
        begin += _room(tensor, box)
    return Holding(held)


def _slices(index: StateIndex) -> Iterator[tuple[TensorSlices, Box]]:
    return ((tensor, box) for tensor in index.values() for box in tensor.boxes)


def _room(tensor: TensorSlices, box: Box) -> int:
    return -(-box.numel * ITEM_BYTES[tensor.dtype] // _ALIGNED) * _ALIGNED


class Aside:
    """One block of memory, which stays allocated from copy to copy; page-locked where the data is on a GPU.

    `allocate`: makes a block of so many bytes, elsewhere than in this process's own memory. `block`: all of it as
    bytes. Two ranks with room for the same index have blocks of the same form.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)
        self._allocate = allocate
        self._index, self._room = StateIndex(), Holding()
        self._copies: torch.cuda.Stream | None = None
        self._coming: tuple[Holding, torch.cuda.Event] | None = None

    def room(self, index: StateIndex, *, pinned: bool = False) -> Holding:
        """Memory for what this index says, holding anything. For the same index it is the same memory."""
        if index != self._index:
            size = block_bytes(index)
            self.block = (
                torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                if self._allocate is None
                else self._allocate(size)
            )
            self._index, self._room = index, laid_out(self.block, index)
        return self._room

    @property
    def arrived(self) -> bool:
        """Whether nothing is under way."""
        return self._coming is None

    def copy(self, held: Iterable[Held]) -> Holding:
        """Copies of these slices, until the next call overwrites them.

        From a GPU they come by themselves, behind what it computes: until `arrive` has returned they may hold anything,
        and the originals must stay as they are.
        """
        self.arrive()
        originals = held if isinstance(held, Holding) else Holding(held)
        index = originals.index()
        pairs = [
            (originals.at(name, number), number) for name, one in index.items() for number in range(len(one.boxes))
        ]
        device = next((one.tensor.device for one, _ in pairs if one.tensor.is_cuda), None)
        room = self.room(index, pinned=device is not None)
        with self._behind(device):
            for original, number in pairs:
                room.at(original.name, number).tensor.copy_(original.tensor, non_blocking=original.tensor.is_cuda)
        if self._copies is not None:
            self._coming = originals, self._copies.record_event()  # holding them: their memory must not be given away
        return room

    def arrive(self) -> None:
        """Wait for what is under way; from any thread."""
        coming = self._coming
        if coming is not None:
            coming[1].synchronize()
            self._coming = None

    def _behind(self, device: torch.device | None) -> AbstractContextManager[object]:
        """A stream of its own, which begins with what the device has been given so far."""
        if device is None:
            return nullcontext()
        if self._copies is None:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._copies)
