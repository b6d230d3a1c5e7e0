"""Snapshots in memory that the processes of a node share, so that they survive the process that took them.

Each slot is an anonymous file in memory (memfd), opened by others through /proc, and freed when no process has it open.
The first eight bytes hold the step of the complete snapshot, the block follows. Only the owner writes, in this order:
no step, the block, the step. A process that is killed or stopped has made all its writes up to some point and none
after it. The step of a lost rank can therefore be trusted.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import NamedTuple
from uuid import uuid4

import torch

from raytrain_hpc.snapshot.memory_store import SnapshotRing, SnapshotSlot, decode_step
from raytrain_hpc.state.host_buffer import HostBuffer, compute_block_bytes, view_shards
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import ShardedState

_HEADER_BYTES = mmap.PAGESIZE


class SharedMemoryHandle(NamedTuple):
    """The path by which other processes of the node open the memory.

    `link_target`: the target of the link at `path`, unique to this memory. It tells whether the path, which contains
    a pid and a descriptor number, still means the same file.
    """

    path: str
    link_target: str


class SharedMemoryBlock:
    """Memory of this process that other processes of the node can open by its `handle`.

    `step_word`: its first eight bytes, see `SnapshotSlot`.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(f"raytrain-snapshot-{uuid4().hex}")
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, _HEADER_BYTES)
        self.step_word = memoryview(mmap.mmap(self._descriptor, _HEADER_BYTES)).cast("q")
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.handle = SharedMemoryHandle(path, os.readlink(path))

    def allocate(self, size: int) -> torch.Tensor:
        """Resize the memory and return its block of `size` bytes, as uint8. For `HostBuffer(allocate=...)`."""
        file_size = _HEADER_BYTES + max(size, 1)
        os.ftruncate(self._descriptor, file_size)
        return _view_block(mmap.mmap(self._descriptor, file_size), size)


def create_shared_snapshots() -> tuple[SnapshotRing, list[SharedMemoryHandle]]:
    """Create slots in shared memory for this rank's snapshots. Return them and the handles for other processes."""
    blocks = SharedMemoryBlock(), SharedMemoryBlock()
    first, second = (SnapshotSlot(HostBuffer(block.allocate), block.step_word) for block in blocks)
    return SnapshotRing((first, second)), [block.handle for block in blocks]


class AttachedSnapshots:
    """Read access to the snapshots of another rank in shared memory, which remain readable if that rank is lost."""

    def __init__(self, handles: Sequence[SharedMemoryHandle], index: StateIndex):
        """Open the memory. `index`: that of the rank's state. Raises OSError if the memory cannot be opened."""
        self._index, self._descriptors = index, []
        for path, link_target in handles:
            self._descriptors.append(descriptor := os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            weakref.finalize(self, os.close, descriptor)
            if (target := os.readlink(f"/proc/self/fd/{descriptor}")) != link_target:
                raise FileNotFoundError(
                    f"{path} is {target}, not {link_target}: it belongs to a process of another machine or container"
                )

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with a complete snapshot, ascending. Read anew on each access."""
        return tuple(sorted(step for step in map(_read_step, self._descriptors) if step is not None))

    def get_state(self, step: int) -> ShardedState:
        """Return the state after `step`; empty if there is no complete snapshot of it.

        The memory is mapped copy-on-write: writing to the result does not change the other rank's snapshot.
        """
        for descriptor in self._descriptors:
            if _read_step(descriptor) == step:
                size = compute_block_bytes(self._index)
                mapping = mmap.mmap(descriptor, _HEADER_BYTES + max(size, 1), access=mmap.ACCESS_COPY)
                return view_shards(_view_block(mapping, size), self._index)
        return ShardedState()


def _read_step(descriptor: int) -> int | None:
    return decode_step(int.from_bytes(os.pread(descriptor, 8, 0), sys.byteorder, signed=True))


def _view_block(mapping: mmap.mmap, size: int) -> torch.Tensor:
    """Return the block after the header as a uint8 tensor that shares the mapped memory."""
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=_HEADER_BYTES)[:size]
