"""Streaming writer of safetensors files: only the tensor being written needs to be in memory."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from raytrain_hpc.checkpoint.checksum import ChecksumBuilder, FileChecksum
from raytrain_hpc.state.shard_index import ITEM_BYTES
from raytrain_hpc.storage.location import Location
from raytrain_hpc.storage.object_path import ObjectPath

_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file: its key, its dtype (a key of ITEM_BYTES) and its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def write_tensors(
    path: Location, entries: Sequence[TensorEntry], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> FileChecksum:
    """Write `tensors`, in the order of `entries`, as one safetensors file. Return its checksum.

    `tensors` may be a generator that creates each tensor on demand. CPU tensors are written without a copy, and the
    checksum is computed while writing. A local file is synced, and its directory must exist; an object is uploaded in
    parallel parts. Raises OSError if writing fails, after removing the partial file, and ValueError if a key occurs
    twice.
    """
    header, checksum = _build_header(entries, metadata), ChecksumBuilder()
    chunks = _iterate_chunks(header, map(_view_bytes, tensors), checksum)
    write_chunks(path, chunks, len(header) + sum(entry.nbytes for entry in entries))
    return checksum.finish()


def write_chunks(path: Location, chunks: Iterable[memoryview | bytes], total_bytes: int) -> None:
    """Write content of `total_bytes` as a local file, synced, or as an object, uploaded in parallel parts.

    Raises OSError, after removing the partial file.
    """
    if isinstance(path, ObjectPath):
        path.upload(chunks, total_bytes)
    else:
        _write_file(path, chunks)


def _iterate_chunks(header: bytes, blocks: Iterable[memoryview], checksum: ChecksumBuilder) -> Iterator[memoryview]:
    """Yield the content of the file in pieces, each after it was added to `checksum`."""
    for block in chain((memoryview(header),), blocks):
        for start in range(0, len(block), _CHUNK_BYTES):
            chunk = block[start : start + _CHUNK_BYTES]
            checksum.update(chunk)
            yield chunk


def _write_file(path: Path, chunks: Iterable[memoryview | bytes]) -> None:
    """Write and sync a local file. Raises OSError after removing the partial file."""
    try:
        with path.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        # On a full disk, the partial file takes space that others need.
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _build_header(entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None) -> bytes:
    """Build the safetensors header: its length as 8 bytes, little-endian, then JSON padded to a multiple of 8."""
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        if entry.key in table:
            raise ValueError(f"{entry.key} is given twice")
        start, end = end, end + entry.nbytes
        dtype = _SAFETENSORS_DTYPES[entry.dtype]
        table[entry.key] = {"dtype": dtype, "shape": entry.shape, "data_offsets": (start, end)}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return the little-endian, row-major bytes of a tensor, without a copy if it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
