"""Journal of recent records in shared memory, which remains readable if its process is lost."""

from __future__ import annotations

import contextlib
import json
import mmap
from typing import Any

from raytrain_hpc.snapshot.shared_file import OpenedFile, SharedFile, SharedMemoryHandle

_HALF_BYTES = 256 << 10


class SharedJournal:
    """The last records that this process has appended: at least 256 KiB of them, as lines of JSON.

    Lines fill two halves of the memory in turn; a half is cleared before it is used again. A line is written before its
    end, so that one of a killed process is either complete or ignored.
    """

    def __init__(self) -> None:
        self._file = SharedFile(2 * _HALF_BYTES)
        self.handle: SharedMemoryHandle = self._file.handle
        self._memory = mmap.mmap(self._file.descriptor, 2 * _HALF_BYTES)
        self._half, self._used, self._count = 0, 0, 0

    def append(self, record: dict[str, Any]) -> None:
        """Add a record, which JSON can represent. One that is larger than a half is left out."""
        self._count += 1
        line = json.dumps([self._count, record]).encode()
        if len(line) >= _HALF_BYTES:
            return
        if self._used + len(line) + 1 > _HALF_BYTES:
            self._half, self._used = 1 - self._half, 0
            self._memory[self._half * _HALF_BYTES : (self._half + 1) * _HALF_BYTES] = bytes(_HALF_BYTES)
        start = self._half * _HALF_BYTES + self._used
        self._memory[start : start + len(line)] = line
        self._memory[start + len(line)] = ord("\n")
        self._used += len(line) + 1


class JournalReader:
    """Read access to the journal of another process of the node, also after that process has ended."""

    def __init__(self, handle: SharedMemoryHandle):
        """Open it. Raises OSError if that fails."""
        self._file = OpenedFile(handle)

    def read(self) -> list[dict[str, Any]]:
        """Return the complete records in the order in which they were appended."""
        content, numbered = self._file.read(), []
        for half in (content[:_HALF_BYTES], content[_HALF_BYTES:]):
            for line in half.split(b"\n")[:-1]:
                with contextlib.suppress(ValueError):  # cut off by the end of the process while it cleared the half
                    numbered.append(json.loads(line))
        return [record for _, record in sorted(numbered, key=lambda pair: pair[0])]
