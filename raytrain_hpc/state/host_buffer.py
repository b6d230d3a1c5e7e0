"""Copies of a state in host memory, at a moment between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from raytrain_hpc.state.shard_index import ITEM_BYTES, Box, StateIndex, TensorSlices
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, ShardedState, StateShard

_ALIGNMENT = 64  # bytes: where any dtype may begin


def compute_block_bytes(index: StateIndex) -> int:
    """Bytes of a block with room for what this index says."""
    return sum(_compute_padded_bytes(tensor, box) for tensor, box in _iter_slices(index))


def view_shards(block: torch.Tensor, index: StateIndex) -> ShardedState:
    """The slices of an index in a block of bytes, one after the other: the same in every process."""
    held, begin = [], 0
    for tensor, box in _iter_slices(index):
        part = block[begin : begin + box.numel * ITEM_BYTES[tensor.dtype]]
        view = part.view(TORCH_DTYPES[tensor.dtype]).view(box.sizes)
        held.append(StateShard(tensor.name, tensor.shape, tensor.dtype, box, view))
        begin += _compute_padded_bytes(tensor, box)
    return ShardedState(held)


def _iter_slices(index: StateIndex) -> Iterator[tuple[TensorSlices, Box]]:
    return ((tensor, box) for tensor in index.values() for box in tensor.boxes)


def _compute_padded_bytes(tensor: TensorSlices, box: Box) -> int:
    return -(-box.numel * ITEM_BYTES[tensor.dtype] // _ALIGNMENT) * _ALIGNMENT


class HostBuffer:
    """One block of memory, which stays allocated from copy to copy; page-locked where the data is on a GPU.

    `allocate`: makes a block of so many bytes, elsewhere than in this process's own memory. `block`: all of it as
    bytes. Two ranks with room for the same index have blocks of the same form.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)
        self._allocate = allocate
        self._index, self._shards = StateIndex(), ShardedState()
        self._copy_stream: torch.cuda.Stream | None = None
        self._pending: tuple[ShardedState, torch.cuda.Event] | None = None

    def reserve(self, index: StateIndex, *, pinned: bool = False) -> ShardedState:
        """Memory for what this index says, holding anything. For the same index it is the same memory."""
        if index != self._index:
            size = compute_block_bytes(index)
            self.block = (
                torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                if self._allocate is None
                else self._allocate(size)
            )
            self._index, self._shards = index, view_shards(self.block, index)
        return self._shards

    @property
    def is_synchronized(self) -> bool:
        """Whether nothing is under way."""
        return self._pending is None

    def copy(self, shards: Iterable[StateShard]) -> ShardedState:
        """Copies of these slices, until the next call overwrites them.

        From a GPU they come by themselves, behind what it computes: until `arrive` has returned they may hold anything,
        and the originals must stay as they are.
        """
        self.synchronize()
        originals = shards if isinstance(shards, ShardedState) else ShardedState(shards)
        index = originals.to_index()
        pairs = [
            (originals.get_shard(name, number), number)
            for name, one in index.items()
            for number in range(len(one.boxes))
        ]
        device = next((one.tensor.device for one, _ in pairs if one.tensor.is_cuda), None)
        room = self.reserve(index, pinned=device is not None)
        with self._use_copy_stream(device):
            for original, number in pairs:
                room.get_shard(original.name, number).tensor.copy_(
                    original.tensor, non_blocking=original.tensor.is_cuda
                )
        if self._copy_stream is not None:
            self._pending = (
                originals,
                self._copy_stream.record_event(),
            )  # holding them: their memory must not be given away
        return room

    def synchronize(self) -> None:
        """Wait for what is under way; from any thread."""
        coming = self._pending
        if coming is not None:
            coming[1].synchronize()
            self._pending = None

    def _use_copy_stream(self, device: torch.device | None) -> AbstractContextManager[object]:
        """A stream of its own, which begins with what the device has been given so far."""
        if device is None:
            return nullcontext()
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copy_stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._copy_stream)
