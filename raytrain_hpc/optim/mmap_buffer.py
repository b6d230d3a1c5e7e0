"""Tensors in a file without a name: a rank's scratch on disk, of which only what is being worked on is in memory."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
_MERGE_GAP_BYTES = 2**18  # bytes between two ranges that are let go of in one call


class MmapBuffer:
    """`size` bytes, all zero, in a file under `directory`, mapped into memory and dealt out as tensors.

    The file never has a name (where a file system cannot do that, it loses it at once), so that neither an end nor a
    kill leaves it behind: its space is free again when the last tensor is. All of the space is reserved here, since a
    disk that fills up later would end the process at some write to memory. Raises OSError where that cannot be.
    """

    def __init__(self, directory: str, size: int):
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  lives as long as this
        size = max(round_up_to_page(size), PAGE)
        os.posix_fallocate(self._file.fileno(), 0, size)
        self._mmap = mmap.mmap(self._file.fileno(), size)
        self._bytes = torch.frombuffer(self._mmap, dtype=torch.uint8)
        self._used, self._last_released = 0, list[tuple[int, int]]()

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """The next `count` elements, from the start of a page on."""
        start, length = self._used, count * dtype.itemsize
        self._used += round_up_to_page(length)
        return self._bytes[start : start + length].view(dtype)

    def prefetch(self, tensors: Sequence[Tensor]) -> None:
        """Begin to read what these tensors, or parts of them, hold."""
        for start, end in self._page_ranges(tensors):
            self._mmap.madvise(mmap.MADV_WILLNEED, start, end - start)

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Take these out of this process's memory and begin to write them.

        The kernel writes what is dirty by and by, and lets go at once only of what is clean: so what was released the
        time before, and is written by now, is told to it a second time.
        """
        ranges = self._page_ranges(tensors)
        for start, end in ranges:
            self._mmap.madvise(mmap.MADV_DONTNEED, start, end - start)
        for start, end in (*self._last_released, *ranges):
            os.posix_fadvise(self._file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
        self._last_released = ranges

    def release_all(self) -> None:
        """`release` for everything."""
        if self._used:
            self.release([self._bytes[: self._used]])

    def _page_ranges(self, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        """(start, end) in the file, in whole pages and with small gaps closed: a page too many is no harm."""
        base, ranges = self._bytes.data_ptr(), list[tuple[int, int]]()
        for start, length in sorted((tensor.data_ptr() - base, tensor.nbytes) for tensor in tensors):
            if ranges and start - ranges[-1][1] <= _MERGE_GAP_BYTES:
                ranges[-1] = ranges[-1][0], round_up_to_page(start + length)
            else:
                ranges.append((start // PAGE * PAGE, round_up_to_page(start + length)))
        return ranges


def round_up_to_page(size: int) -> int:
    """Bytes that `size` bytes take in whole pages."""
    return -(-size // PAGE) * PAGE


def get_free_bytes(directory: str) -> int | None:
    """Room on the disk of a directory; None where nobody can tell."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None
