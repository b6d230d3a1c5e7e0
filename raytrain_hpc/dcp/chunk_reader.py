"""Reading the tensors of a DCP directory by boxes, with one chunk and one box in memory at a time."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from raytrain_hpc.dcp.metadata_reader import DcpChunk, DcpTensor
from raytrain_hpc.errors import CheckpointError
from raytrain_hpc.state.shard_index import Box, RegionCopy, StateIndex, TensorSlices, find_missing, plan_copies

FLOAT_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_FP32_BYTES = 4
_LOAD_ERRORS = (RuntimeError, pickle.UnpicklingError, ValueError, TypeError, LookupError, EOFError, OSError)


class ChunkReader:
    """Reads boxes of the tensors of one DCP directory. The last chunk that was read is kept in memory."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._last: tuple[DcpChunk, Tensor] | None = None

    def check(self, tensor: DcpTensor) -> None:
        """Check that the chunks of a tensor cover it exactly once and that their files are long enough.

        No file is opened. Raises CheckpointError that names the tensor and the first region or file at fault.
        """
        where = f"{self._directory}: {tensor.name}"
        if tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(f"{where} is {tensor.dtype}; only {', '.join(FLOAT_DTYPES)} can be imported")
        whole = StateIndex([TensorSlices(tensor.name, tensor.shape, "float32", (Box.from_shape(tensor.shape),))])
        for _, region in find_missing([_index_chunks(tensor)], whole):
            raise CheckpointError(f"{where}{region} is missing: no chunk holds it")
        if sum(chunk.box.numel for chunk in tensor.chunks) > whole[tensor.name].boxes[0].numel:
            raise CheckpointError(f"{where}{_find_overlap(tensor.chunks)} is in two chunks")
        for chunk in tensor.chunks:
            self._check_file(chunk)

    def _check_file(self, chunk: DcpChunk) -> None:
        path, end = self._directory / chunk.file, chunk.offset + chunk.length
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        if size < end:
            raise CheckpointError(f"{path}: is truncated: {size} bytes, of which .metadata needs {end}")

    def read(self, tensor: DcpTensor, copies: Sequence[RegionCopy], sizes: tuple[int, ...]) -> Tensor:
        """Read one box of a tensor: fp32 [*sizes].

        `copies` are those of `plan_box_copies` for the box. Raises CheckpointError if a chunk cannot be read, or if it
        does not have the shape and dtype that the metadata says.
        """
        box = torch.empty(sizes, dtype=torch.float32)
        for copy in sorted(copies, key=lambda copy: tensor.chunks[copy.source_box_number].box):
            # Without a variable for the chunk: it would keep the last one in memory while the next one is read.
            box[copy.destination_slices].copy_(
                self._load(tensor, tensor.chunks[copy.source_box_number])[copy.source_slices]
            )
        return box

    def _load(self, tensor: DcpTensor, chunk: DcpChunk) -> Tensor:
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        self._last = None  # freed before the next chunk is allocated
        path = self._directory / chunk.file
        try:
            with path.open("rb") as file:
                chunk_file = io.BufferedReader(_FileRange(file, chunk))
                loaded = torch.load(chunk_file, map_location="cpu", weights_only=True)
        except _LOAD_ERRORS as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{path}: {tensor.name}{chunk.box} cannot be read: {reason}") from error
        actual, expected = _describe(loaded), f"{tensor.dtype} {list(chunk.box.sizes)}"
        if actual != expected:
            raise CheckpointError(f"{path}: {tensor.name}{chunk.box} is {actual}; .metadata says {expected}")
        self._last = (chunk, loaded)
        return self._last[1]


def plan_box_copies(tensor: DcpTensor, boxes: Sequence[Box]) -> list[list[RegionCopy]]:
    """Plan the copies that fill each of these boxes from the chunks of a tensor, for `ChunkReader.read`."""
    destination = StateIndex([TensorSlices(tensor.name, tensor.shape, "float32", tuple(boxes))])
    copies: list[list[RegionCopy]] = [[] for _ in boxes]
    for copy in plan_copies(_index_chunks(tensor), destination):
        copies[copy.destination_box_number].append(copy)
    return copies


def split_into_boxes(tensor: DcpTensor, row_multiple: int, max_bytes: int) -> list[Box]:
    """Split a tensor into boxes of at most `max_bytes` in fp32, so that boxes of one chunk follow each other.

    Boxes begin and end at multiples of `row_multiple` in dimension 0, which no box divides, however large these rows
    are. Columns are only split at edges of chunks, and only where the rows between two edges are too large.
    """
    if not tensor.shape:
        return [Box((), ())]
    rows, *others = tensor.shape
    row_bytes = _FP32_BYTES * Box.from_shape(others).numel
    ends = sorted({end - end % row_multiple for chunk in tensor.chunks for end in chunk.box.ends[:1]} - {0} | {rows})
    columns = sorted({0} | {end for chunk in tensor.chunks for end in chunk.box.ends[1:2]}) if others else []
    boxes, start = [], 0
    for number, end in enumerate(ends):
        following = ends[number + 1] if number + 1 < len(ends) else None
        if following is not None and (following - start) * row_bytes <= max_bytes:
            continue
        band = Box((start, *(0 for _ in others)), (end - start, *others))
        parts = _split_columns(band, columns) if band.numel * _FP32_BYTES > max_bytes and columns else [band]
        boxes += [box for part in parts for box in _split_rows(part, row_multiple, max_bytes)]
        start = end
    return boxes


def _split_columns(band: Box, edges: Sequence[int]) -> list[Box]:
    """Split a box in dimension 1 at these edges, which include its ends."""
    return [
        Box((band.offsets[0], left, *band.offsets[2:]), (band.sizes[0], right - left, *band.sizes[2:]))
        for left, right in pairwise(edges)
    ]


def _split_rows(part: Box, row_multiple: int, max_bytes: int) -> list[Box]:
    """Split a box in dimension 0 into boxes of at most `max_bytes`, or of `row_multiple` rows."""
    rows, *others = part.sizes
    group_bytes = _FP32_BYTES * row_multiple * Box.from_shape(others).numel
    count = row_multiple * max(1, max_bytes // group_bytes)
    return [
        Box((part.offsets[0] + start, *part.offsets[1:]), (min(count, rows - start), *others))
        for start in range(0, rows, count)
    ]


def _index_chunks(tensor: DcpTensor) -> StateIndex:
    boxes = tuple(chunk.box for chunk in tensor.chunks)
    return StateIndex([TensorSlices(tensor.name, tensor.shape, "float32", boxes)])


def _find_overlap(chunks: Sequence[DcpChunk]) -> Box | None:
    """Return the first region that two chunks hold."""
    for number, chunk in enumerate(chunks):
        for other in chunks[:number]:
            if (common := chunk.box.intersection(other.box)).numel:
                return common
    return None


def _describe(loaded: Any) -> str:
    """Describe a loaded object as dtype and shape, or as its type if it is not a dense tensor."""
    if not isinstance(loaded, Tensor) or loaded.layout != torch.strided:
        return type(loaded).__name__
    return f"{str(loaded.dtype).removeprefix('torch.')} {list(loaded.shape)}"


class _FileRange(io.RawIOBase):
    """The bytes of one chunk as a file of their own, of which torch.load reads only what it needs."""

    def __init__(self, file: BinaryIO, chunk: DcpChunk):
        self._file, self._start, self._length, self._position = file, chunk.offset, chunk.length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer` and return the number of bytes; 0 at the end of the chunk."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return int(count)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Change the position, relative to the start or the end of the chunk or to the position, and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position
