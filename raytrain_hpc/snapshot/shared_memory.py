"""Snapshots in memory that the processes of a node share, so that they survive the process that took them.

Each slot is a shared file. Its first eight bytes hold the step of the complete snapshot, the block follows. Only the
owner writes, in this order: no step, the block, the step. A process that is killed or stopped has made all its writes
up to some point and none after it. The step of a lost rank can therefore be trusted. Another file has the index of the
state, which tells any process that opens the files how to read the snapshots.
"""

from __future__ import annotations

import json
import mmap
import os

import torch

from raytrain_hpc.snapshot.memory_store import NUM_SLOTS, SnapshotRing, SnapshotSlot
from raytrain_hpc.snapshot.shared_file import OpenedSnapshots, SharedFile, SnapshotHandles
from raytrain_hpc.state.host_buffer import HostBuffer, compute_block_bytes, view_shards
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import ShardedState

_HEADER_BYTES = mmap.PAGESIZE


class SharedMemoryBlock(SharedFile):
    """Memory of this process for a snapshot. `step_word`: its first eight bytes, see `SnapshotSlot`."""

    def __init__(self) -> None:
        super().__init__(_HEADER_BYTES)
        self.step_word = memoryview(mmap.mmap(self.descriptor, _HEADER_BYTES)).cast("q")

    def allocate(self, size: int) -> torch.Tensor:
        """Resize the memory and return its block of `size` bytes, as uint8. For `HostBuffer(allocate=...)`."""
        file_size = _HEADER_BYTES + max(size, 1)
        os.ftruncate(self.descriptor, file_size)
        return _view_block(mmap.mmap(self.descriptor, file_size), size)


class SharedSnapshots(SnapshotRing):
    """Slots for the snapshots of one rank in shared memory, which other processes of the node open by `handles`."""

    def __init__(self, index: StateIndex) -> None:
        """Create the memory. `index`: that of the rank's state."""
        blocks = [SharedMemoryBlock() for _ in range(NUM_SLOTS)]
        super().__init__([SnapshotSlot(HostBuffer(block.allocate), block.step_word) for block in blocks])
        text = json.dumps(index.to_json()).encode()
        self._index_file = SharedFile(len(text))
        os.pwrite(self._index_file.descriptor, text, 0)
        self.handles = SnapshotHandles(tuple(block.handle for block in blocks), self._index_file.handle)


class AttachedSnapshots(OpenedSnapshots):
    """Read access to the snapshots of another rank in shared memory, which remain readable if that rank is lost."""

    def get_state(self, step: int) -> ShardedState:
        """Return the state after `step`; empty if there is no complete snapshot of it.

        The memory is mapped copy-on-write: writing to the result does not change the other rank's snapshot.
        """
        slot = self.find_slot(step)
        if slot is None:
            return ShardedState()
        index = StateIndex.from_json(json.loads(self.index_file.read()))
        size = compute_block_bytes(index)
        mapping = mmap.mmap(slot.descriptor, _HEADER_BYTES + max(size, 1), access=mmap.ACCESS_COPY)
        return view_shards(_view_block(mapping, size), index)


def _view_block(mapping: mmap.mmap, size: int) -> torch.Tensor:
    """Return the block after the header as a uint8 tensor that shares the mapped memory."""
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=_HEADER_BYTES)[:size]
