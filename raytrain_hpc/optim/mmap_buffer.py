"""Memory-mapped buffer for tensors on disk, of which only the part in use is in memory."""

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
_MERGE_GAP_BYTES = 2**18  # ranges with a smaller gap are handled in one call


class MmapBuffer:
    """Buffer of `size` zero bytes in a mapped file under `directory`, allocated as tensors.

    The file has no name (or loses it at once, on file systems that need one), so that it is deleted even if the process
    is killed. Its space is freed with the last tensor. All space is reserved at construction, since a write to memory
    would end the process if the disk were full. Raises OSError if the space cannot be reserved.
    """

    def __init__(self, directory: str, size: int):
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115  lives as long as this buffer
        size = max(round_up_to_page(size), PAGE)
        os.posix_fallocate(self._file.fileno(), 0, size)
        self._mmap = mmap.mmap(self._file.fileno(), size)
        self._bytes = torch.frombuffer(self._mmap, dtype=torch.uint8)
        self._used, self._last_released = 0, list[tuple[int, int]]()

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate the next `count` elements, from the start of a page."""
        start, length = self._used, count * dtype.itemsize
        self._used += round_up_to_page(length)
        return self._bytes[start : start + length].view(dtype)

    def prefetch(self, tensors: Sequence[Tensor]) -> None:
        """Start to read the pages of these tensors, which may be views of allocated ones."""
        for start, end in self._get_page_ranges(tensors):
            self._mmap.madvise(mmap.MADV_WILLNEED, start, end - start)

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Remove these tensors from this process's memory and start to write them.

        The kernel drops only clean pages at once and writes dirty ones later. The ranges of the previous call, written
        by now, are therefore released a second time.
        """
        ranges = self._get_page_ranges(tensors)
        for start, end in ranges:
            self._mmap.madvise(mmap.MADV_DONTNEED, start, end - start)
        for start, end in (*self._last_released, *ranges):
            os.posix_fadvise(self._file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
        self._last_released = ranges

    def release_all(self) -> None:
        """Release all tensors."""
        if self._used:
            self.release([self._bytes[: self._used]])

    def _get_page_ranges(self, tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Return the (start, end) of tensors in the file, in whole pages, with small gaps closed."""
        base, ranges = self._bytes.data_ptr(), list[tuple[int, int]]()
        for start, length in sorted((tensor.data_ptr() - base, tensor.nbytes) for tensor in tensors):
            if ranges and start - ranges[-1][1] <= _MERGE_GAP_BYTES:
                ranges[-1] = ranges[-1][0], round_up_to_page(start + length)
            else:
                ranges.append((start // PAGE * PAGE, round_up_to_page(start + length)))
        return ranges


def round_up_to_page(size: int) -> int:
    """Round a size in bytes up to whole pages."""
    return -(-size // PAGE) * PAGE


def get_free_bytes(directory: str) -> int | None:
    """Return the free bytes on the disk of a directory; None if they cannot be determined."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None
