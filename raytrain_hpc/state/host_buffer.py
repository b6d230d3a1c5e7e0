"""Copies of a training state in host memory. Copies from a GPU overlap with the next training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from raytrain_hpc.state.shard_index import ITEM_BYTES, Box, StateIndex, TensorSlices
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, ShardedState, StateShard
from raytrain_hpc.torch_device import get_device_module, is_on_accelerator

_ALIGNMENT = 64  # bytes: a multiple of every dtype's alignment


def compute_block_bytes(index: StateIndex) -> int:
    """Return the size in bytes of a block that holds all slices of `index`, each padded to the alignment."""
    return sum(_compute_padded_bytes(tensor, box) for tensor, box in _iter_slices(index))


def view_shards(block: torch.Tensor, index: StateIndex) -> ShardedState:
    """Return the slices of `index` as views of a uint8 `block`, one after another.

    The layout depends on `index` alone, including the order of its names, so every process reads a block in the same
    way.
    """
    shards, start = [], 0
    for tensor, box in _iter_slices(index):
        data = block[start : start + box.numel * ITEM_BYTES[tensor.dtype]]
        view = data.view(TORCH_DTYPES[tensor.dtype]).view(box.sizes)
        shards.append(StateShard(tensor.name, tensor.shape, tensor.dtype, box, view))
        start += _compute_padded_bytes(tensor, box)
    return ShardedState(shards)


def _iter_slices(index: StateIndex) -> Iterator[tuple[TensorSlices, Box]]:
    return ((tensor, box) for tensor in index.values() for box in tensor.boxes)


def _compute_padded_bytes(tensor: TensorSlices, box: Box) -> int:
    return -(-box.numel * ITEM_BYTES[tensor.dtype] // _ALIGNMENT) * _ALIGNMENT


class HostBuffer:
    """One block of host memory that is reused from copy to copy.

    `allocate`: returns a uint8 tensor of the given number of bytes, for example in shared memory. Pass it for CPU data
    only: by default memory is page-locked if the data comes from a GPU, and only such copies overlap with computation.
    `block`: the whole buffer as bytes. Blocks of two ranks that first reserved the same index, with names in the same
    order, have the same layout; they can be sent as raw bytes.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor] | None = None) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)
        self._allocate = allocate
        self._index, self._shards = StateIndex(), ShardedState()
        self._copy_stream: Any = None
        self._pending: tuple[ShardedState, Any] | None = None  # originals and the event at which they are copied

    def reserve(self, index: StateIndex, *, pinned: bool = False) -> ShardedState:
        """Return memory for the slices of `index`. The content is undefined after a reallocation, else unchanged.

        The block is reallocated only if `index` differs from that of the last call.
        """
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
        """Whether the content of the copies is defined: `synchronize` has returned since the last copy from a GPU."""
        return self._pending is None

    def copy(self, shards: Iterable[StateShard]) -> ShardedState:
        """Copy `shards` into the buffer and return the copies, grouped by name. The next call overwrites them.

        Waits for the previous copy first. Copies from a GPU are asynchronous and overlap with its computation: the
        caller must call `synchronize` before it reads the copies or changes the originals.
        """
        self.synchronize()
        originals = shards if isinstance(shards, ShardedState) else ShardedState(shards)
        index = originals.to_index()
        pairs = [
            (originals.get_shard(name, number), number)
            for name, tensor in index.items()
            for number in range(len(tensor.boxes))
        ]
        device = next((shard.tensor.device for shard, _ in pairs if is_on_accelerator(shard.tensor)), None)
        copies = self.reserve(index, pinned=device is not None)
        with self._use_copy_stream(device):
            for original, number in pairs:
                copies.get_shard(original.name, number).tensor.copy_(
                    original.tensor, non_blocking=is_on_accelerator(original.tensor)
                )
        if self._copy_stream is not None:
            # Keep the originals referenced: their memory must not be reused before the copies are done.
            self._pending = originals, self._copy_stream.record_event()
        return copies

    def synchronize(self) -> None:
        """Wait for the copies in progress. Callable from any thread."""
        pending = self._pending
        if pending is not None:
            pending[1].synchronize()
            self._pending = None

    def _use_copy_stream(self, device: torch.device | None) -> AbstractContextManager[object]:
        """Return a context in which work runs on the copy stream, after the work queued on `device` so far."""
        if device is None:
            return nullcontext()
        module = get_device_module(device)
        if self._copy_stream is None:
            self._copy_stream = module.Stream(device)
        self._copy_stream.wait_stream(module.current_stream(device))
        context: AbstractContextManager[object] = module.stream(self._copy_stream)
        return context
