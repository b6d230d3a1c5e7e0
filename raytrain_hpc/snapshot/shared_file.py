"""Anonymous files in memory (memfd) that the processes of a node share. Needs no torch.

A file is opened by others through /proc, and freed when no process has it open: it outlives the process that made it.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

_NO_STEP = -1


class SharedMemoryHandle(NamedTuple):
    """The path by which other processes of the node open the memory.

    `link_target`: the target of the link at `path`, unique to this memory. It tells whether the path, which contains
    a pid and a descriptor number, still means the same file.
    """

    path: str
    link_target: str


class SnapshotHandles(NamedTuple):
    """The shared memory of the snapshots of one rank: its slots, and the index of its state."""

    slots: tuple[SharedMemoryHandle, ...]
    state_index: SharedMemoryHandle

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> SnapshotHandles:
        """Return the handles of which `data` is what `json.loads(json.dumps(handles))` returns."""
        slots, index = data
        return cls(tuple(SharedMemoryHandle(*slot) for slot in slots), SharedMemoryHandle(*index))


class SharedFile:
    """An anonymous file in memory. Other processes of the node can open it by its `handle` until this one closes it."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create(f"raytrain-shared-{uuid4().hex}")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size)
        self.handle = make_handle(self.descriptor)


class OpenedFile:
    """The file of another process, open for reading until this object is freed."""

    def __init__(self, handle: SharedMemoryHandle):
        """Open it. Raises OSError if that fails."""
        self.descriptor = os.open(handle.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        if (target := os.readlink(f"/proc/self/fd/{self.descriptor}")) != handle.link_target:
            raise FileNotFoundError(
                f"{handle.path} is {target}, not {handle.link_target}: it belongs to a process of another machine or "
                "container"
            )

    def read(self) -> bytes:
        """Return the whole content."""
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)


class OpenedSnapshots:
    """The snapshots of another rank in shared memory, held open: they remain if that rank is lost."""

    def __init__(self, handles: SnapshotHandles):
        """Open the memory. Raises OSError if it cannot be opened."""
        self._slots, self.index_file = [OpenedFile(handle) for handle in handles.slots], OpenedFile(handles.state_index)

    def make_handles(self, step: int) -> SnapshotHandles:
        """Return the handles by which others open the snapshot of `step` through this process."""
        slot = self.find_slot(step)
        slots = () if slot is None else (make_handle(slot.descriptor),)
        return SnapshotHandles(slots, make_handle(self.index_file.descriptor))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with a complete snapshot, ascending. Read anew on each access."""
        return tuple(sorted(step for step in map(_read_step, self._slots) if step is not None))

    def find_slot(self, step: int) -> OpenedFile | None:
        """Return the file of the slot with the complete snapshot of `step`; None if there is none."""
        return next((slot for slot in self._slots if _read_step(slot) == step), None)

    def keep_step(self, step: int) -> None:
        """Close the slots that have no complete snapshot of `step`."""
        self._slots = [slot for slot in self._slots if _read_step(slot) == step]


def make_handle(descriptor: int) -> SharedMemoryHandle:
    """Return the handle of a file that this process has open."""
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    return SharedMemoryHandle(path, os.readlink(path))


def encode_step(step: int | None) -> int:
    """Return the word that stands for the step of a complete snapshot, or for none."""
    return _NO_STEP if step is None else step


def decode_step(word: int) -> int | None:
    """Decode the value of a step word; None if no snapshot is complete."""
    return None if word == _NO_STEP else word


def _read_step(slot: OpenedFile) -> int | None:
    return decode_step(int.from_bytes(os.pread(slot.descriptor, 8, 0), sys.byteorder, signed=True))
