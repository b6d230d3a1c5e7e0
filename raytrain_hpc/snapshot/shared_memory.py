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

from raytrain_hpc.snapshot.memory_store import LastSteps, Slot, step_of
from raytrain_hpc.state.host_buffer import Aside, block_bytes, laid_out
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import Holding

_HEAD = mmap.PAGESIZE


class Opening(NamedTuple):
    """Where another process of the node finds a file. `link`: what the path leads to, and no other path does."""

    path: str
    link: str


class SharedBlock:
    """Memory of this process that others can open."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(f"raytrain-snapshot-{uuid4().hex}")
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, _HEAD)
        self.mark = memoryview(mmap.mmap(self._descriptor, _HEAD)).cast("q")
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.opening = Opening(path, os.readlink(path))

    def allocate(self, size: int) -> torch.Tensor:
        """Its block, of so many bytes."""
        room = _HEAD + max(size, 1)
        os.ftruncate(self._descriptor, room)
        return _bytes(mmap.mmap(self._descriptor, room), size)


def shared_steps() -> tuple[LastSteps, list[Opening]]:
    """Room for the states of this rank, and where others find it."""
    blocks = SharedBlock(), SharedBlock()
    first, second = (Slot(Aside(block.allocate), block.mark) for block in blocks)
    return LastSteps((first, second)), [block.opening for block in blocks]


class OpenedSteps:
    """The states of another rank after its last two steps, which it keeps itself."""

    def __init__(self, openings: Sequence[Opening], index: StateIndex):
        """`index`: what the rank holds. Raises OSError where this process cannot open its memory."""
        self._index, self._descriptors = index, []
        for path, link in openings:
            self._descriptors.append(descriptor := os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            weakref.finalize(self, os.close, descriptor)
            if (found := os.readlink(f"/proc/self/fd/{descriptor}")) != link:
                raise FileNotFoundError(f"{path} is {found}, not {link}: of a process of another machine or container")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held whole, ascending."""
        return tuple(sorted(step for step in map(_marked, self._descriptors) if step is not None))

    def at(self, step: int) -> Holding:
        """The state of `step`; nothing where it is not held."""
        for descriptor in self._descriptors:
            if _marked(descriptor) == step:
                size = block_bytes(self._index)
                # Private: whatever is done with it here, the rank's own does not change.
                private = mmap.mmap(descriptor, _HEAD + max(size, 1), access=mmap.ACCESS_COPY)
                return laid_out(_bytes(private, size), self._index)
        return Holding()


def _marked(descriptor: int) -> int | None:
    return step_of(int.from_bytes(os.pread(descriptor, 8, 0), sys.byteorder, signed=True))


def _bytes(mapped: mmap.mmap, size: int) -> torch.Tensor:
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=_HEAD)[:size]
