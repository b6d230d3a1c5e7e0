"""Streaming writer of safetensors files: only the tensor being written needs to be in memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from raytrain_hpc.state.shard_index import ITEM_BYTES

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
    path: Path, entries: Sequence[TensorEntry], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write `tensors`, in the order of `entries`, as one synced safetensors file. Return (bytes, hex SHA-256).

    `tensors` may be a generator that creates each tensor on demand. CPU tensors are written without a copy, and the
    checksum is computed while writing. The directory must exist. Raises OSError if writing fails, after removing the
    partial file, and ValueError if a key occurs twice.
    """
    try:
        return _write(path, _build_header(entries, metadata), map(_view_bytes, tensors))
    except OSError:
        # On a full disk, the partial file takes space that others need.
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _write(path: Path, header: bytes, blocks: Iterable[memoryview]) -> tuple[int, str]:
    """Write header and data blocks, and sync. Return (bytes, hex SHA-256)."""
    checksum = hashlib.sha256(header)
    with path.open("wb") as file:
        file.write(header)
        for block in blocks:
            for start in range(0, len(block), _CHUNK_BYTES):
                chunk = block[start : start + _CHUNK_BYTES]
                file.write(chunk)
                checksum.update(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), checksum.hexdigest()


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
