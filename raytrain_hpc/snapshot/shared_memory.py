"""Snapshots in memory that the processes of a node share: whoever has opened them has them when their rank is gone.

Each is a file in memory, without a name, opened through /proc, and gone when nobody has it open. Before its block come
eight bytes that say which step is whole in it. Only the rank itself writes: first that none is, then the block, then
the step. A process that is killed or stopped has made all its stores up to some moment and none after it, so what the
eight bytes of a lost rank say is so.
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
    """Where another process of the node finds a file. `link`: what the path leads to, and no other path does."""

    path: str
    link_target: str


class SharedMemoryBlock:
    """Memory of this process that others can open."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(f"raytrain-snapshot-{uuid4().hex}")
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, _HEADER_BYTES)
        self.step_word = memoryview(mmap.mmap(self._descriptor, _HEADER_BYTES)).cast("q")
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.handle = SharedMemoryHandle(path, os.readlink(path))

    def allocate(self, size: int) -> torch.Tensor:
        """Its block, of so many bytes."""
        room = _HEADER_BYTES + max(size, 1)
        os.ftruncate(self._descriptor, room)
        return _view_block(mmap.mmap(self._descriptor, room), size)


def create_shared_snapshots() -> tuple[SnapshotRing, list[SharedMemoryHandle]]:
    """Room for the states of this rank, and where others find it."""
    blocks = SharedMemoryBlock(), SharedMemoryBlock()
    first, second = (SnapshotSlot(HostBuffer(block.allocate), block.step_word) for block in blocks)
    return SnapshotRing((first, second)), [block.handle for block in blocks]


class AttachedSnapshots:
    """The states of another rank after its last two steps, which it keeps itself."""

    def __init__(self, handles: Sequence[SharedMemoryHandle], index: StateIndex):
        """`index`: what the rank holds. Raises OSError where this process cannot open its memory."""
        self._index, self._descriptors = index, []
        for path, link in handles:
            self._descriptors.append(descriptor := os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            weakref.finalize(self, os.close, descriptor)
            if (found := os.readlink(f"/proc/self/fd/{descriptor}")) != link:
                raise FileNotFoundError(f"{path} is {found}, not {link}: of a process of another machine or container")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held whole, ascending."""
        return tuple(sorted(step for step in map(_read_step, self._descriptors) if step is not None))

    def get_state(self, step: int) -> ShardedState:
        """The state of `step`; nothing where it is not held."""
        for descriptor in self._descriptors:
            if _read_step(descriptor) == step:
                size = compute_block_bytes(self._index)
                # Private: whatever is done with it here, the rank's own does not change.
                private = mmap.mmap(descriptor, _HEADER_BYTES + max(size, 1), access=mmap.ACCESS_COPY)
                return view_shards(_view_block(private, size), self._index)
        return ShardedState()


def _read_step(descriptor: int) -> int | None:
    return decode_step(int.from_bytes(os.pread(descriptor, 8, 0), sys.byteorder, signed=True))


def _view_block(mapped: mmap.mmap, size: int) -> torch.Tensor:
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=_HEADER_BYTES)[:size]
