"""Tensors to and from the safetensors files of a checkpoint: one file a rank, each slice named by its place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from raytrain_hpc.checkpoint.manifest import Checkpoint, Part, ShardEntry, ShardReport
from raytrain_hpc.errors import CheckpointDamaged, CheckpointError
from raytrain_hpc.state.holding import Held, Holding, dtype_name
from raytrain_hpc.state.index import Piece, compare, intersect, missing

_FORMAT_DTYPES = {
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


def write_shard(path: Path, tensors: Iterable[Held]) -> ShardReport:
    """Write these slices as one safetensors file, synced to disk, and say what was written.

    The directory must exist: it is made, and taken away, by the driver alone. Tensors on the CPU go to the file without
    a copy, others one at a time; the checksum is taken on the way. Empty slices are left out. Raises OSError where the
    disk refuses, after removing the partial file, and ValueError where one box is given twice.
    """
    held = [one for one in tensors if one.box.numel]
    entries = tuple(
        ShardEntry(one.name, one.shape, one.dtype, one.box.offsets, one.box.sizes, f"{one.name}{one.box}")
        for one in held
    )
    try:
        size, checksum = _write(path, [_header(entries, held), *map(_bytes_of, held)])
    except OSError:
        # On a full disk the partial file is what stands in the way of everybody else.
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return ShardReport(path.name, size, checksum, entries)


def _write(path: Path, blocks: Iterable[memoryview]) -> tuple[int, str]:
    """Write and sync; (bytes, hex SHA-256)."""
    checksum = hashlib.sha256()
    with path.open("wb") as file:
        for block in blocks:
            for start in range(0, len(block), _CHUNK_BYTES):
                chunk = block[start : start + _CHUNK_BYTES]
                file.write(chunk)
                checksum.update(chunk)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), checksum.hexdigest()


def _header(entries: Iterable[ShardEntry], held: Iterable[Held]) -> memoryview:
    """The safetensors header: its length as 8 bytes, little-endian, then JSON padded to a multiple of 8."""
    table: dict[str, dict[str, object]] = {}
    end = 0
    for entry, one in zip(entries, held, strict=True):
        if entry.key in table:
            raise ValueError(f"{entry.key} is given twice")
        start, end = end, end + one.bytes
        table[entry.key] = {"dtype": _FORMAT_DTYPES[entry.dtype], "shape": entry.sizes, "data_offsets": (start, end)}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes_of(held: Held) -> memoryview:
    """The raw little-endian, row-major bytes; a view wherever the tensor is contiguous on the CPU."""
    flat = held.tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read_pieces(checkpoint: Checkpoint, destination: Holding) -> None:
    """Fill every slice of `destination` in place from a checkpoint that was written on any layout.

    Files are memory-mapped: only the rows needed are read. Tensors that only the checkpoint holds are left out; whether
    there should be any is for the caller to ask, with `state.index.compare`. Raises CheckpointError, before any tensor
    is changed, naming the first tensor that is missing, has another shape or dtype or is not covered; and
    CheckpointDamaged where a file does not hold what the manifest says.
    """
    wanted = destination.index()
    source = checkpoint.index.only(wanted)
    if difference := compare(source, wanted):
        raise CheckpointError(f"{checkpoint.path} does not fit this run: {difference} there")
    for name, region in missing([source], wanted):
        raise CheckpointError(f"{checkpoint.path} does not hold {name}{region}")
    by_file: dict[str, list[tuple[Part, Piece]]] = {}
    for piece in intersect(source, wanted):
        part = checkpoint.parts[piece.name][piece.source]
        by_file.setdefault(part.file, []).append((part, piece))
    for file, pieces in by_file.items():
        _read_file(checkpoint.path / file, pieces, destination)


def _read_file(path: Path, pieces: Iterable[tuple[Part, Piece]], destination: Holding) -> None:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for part, piece in pieces:
                # A view of the mapped file: slicing it touches the pages of the slice alone.
                stored = file.get_tensor(part.key)
                target = destination.at(piece.name, piece.destination)
                if tuple(stored.shape) != part.box.sizes or dtype_name(stored.dtype) != target.dtype:
                    found = f"{dtype_name(stored.dtype)} {list(stored.shape)}"
                    raise CheckpointDamaged(f"{path}: {part.key} is {found}, not what the manifest says")
                target.tensor[piece.destination_slices].copy_(stored[piece.source_slices])
    except (SafetensorError, OSError) as error:
        raise CheckpointDamaged(f"{path}: cannot be read: {error}") from error
