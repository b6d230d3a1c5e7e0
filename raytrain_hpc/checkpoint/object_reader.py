"""Reading slices of a shard file in an object store: parallel range requests, each block verified by its checksum."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch

from raytrain_hpc.checkpoint.checksum import FileChecksum
from raytrain_hpc.checkpoint.manifest import ShardLocation
from raytrain_hpc.checkpoint.verification import describe_read_error
from raytrain_hpc.errors import CheckpointCorruptedError
from raytrain_hpc.state.shard_index import ITEM_BYTES, RegionCopy
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.storage.object_path import ObjectPath

_BLOCKS_PER_REQUEST = 4
_REQUESTS_IN_FLIGHT = 8
_PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class _Piece:
    """Consecutive rows of a box in the file, at bytes `start` to `stop`, and what to copy from them."""

    start: int
    stop: int
    rows_shape: tuple[int, ...]
    source_slices: tuple[slice, ...]
    target: torch.Tensor


def read_object(
    path: ObjectPath,
    checksum: FileChecksum,
    copies: Iterable[tuple[ShardLocation, RegionCopy]],
    destination: ShardedState,
) -> None:
    """Copy the planned regions from one shard file. Only blocks that hold a part of their rows are requested.

    Raises CheckpointCorruptedError if the file does not match the manifest, and CheckpointError if storage fails.
    """
    reader = _BlockReader(path, checksum)
    offsets = _read_offsets(reader)
    pieces = sorted(
        (piece for location, copy in copies for piece in _plan_pieces(path, offsets, location, copy, destination)),
        key=lambda piece: piece.start,
    )
    window: deque[tuple[int, memoryview]] = deque()  # consecutive or separate ranges that pending pieces need
    ranges = reader.read_ranges(pieces)
    for piece in pieces:
        while window and window[0][0] + len(window[0][1]) <= piece.start:
            window.popleft()
        while not window or window[-1][0] + len(window[-1][1]) < piece.stop:
            window.append(next(ranges))
        _copy_piece(piece, window)


def _read_offsets(reader: _BlockReader) -> dict[str, tuple[int, int]]:
    """Return the bytes (start, stop) of each tensor in the file. Raises CheckpointCorruptedError."""
    try:
        end = 8 + int.from_bytes(reader.read(0, 8), "little")
        table = json.loads(bytes(reader.read(8, end)))
        return {key: (end + entry["data_offsets"][0], end + entry["data_offsets"][1]) for key, entry in table.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorruptedError(f"{reader.path}: its header cannot be read: {error!r}") from error


def _plan_pieces(
    path: ObjectPath,
    offsets: dict[str, tuple[int, int]],
    location: ShardLocation,
    copy: RegionCopy,
    destination: ShardedState,
) -> Iterator[_Piece]:
    """Yield the rows of a box that hold the region to copy, in pieces of about `_PIECE_BYTES`."""
    shard = destination.get_shard(copy.name, copy.destination_box_number)
    sizes, item_bytes = location.box.sizes, ITEM_BYTES[shard.dtype]
    start, stop = offsets.get(location.key, (0, 0))
    if stop - start != prod(sizes) * item_bytes:
        raise CheckpointCorruptedError(f"{path}: {location.key} is not as listed in the manifest")
    target = shard.tensor[copy.destination_slices]
    if not sizes:
        yield _Piece(start, stop, (), (), target)
        return
    row_bytes = prod(sizes[1:]) * item_bytes
    rows_per_piece = max(1, _PIECE_BYTES // row_bytes)
    first, last = copy.source_slices[0].start, copy.source_slices[0].stop
    for row in range(first, last, rows_per_piece):
        end_row = min(last, row + rows_per_piece)
        yield _Piece(
            start + row * row_bytes,
            start + end_row * row_bytes,
            (end_row - row, *sizes[1:]),
            (slice(None), *copy.source_slices[1:]),
            target[row - first : end_row - first],
        )


def _copy_piece(piece: _Piece, window: Iterable[tuple[int, memoryview]]) -> None:
    """Copy a piece from the ranges that hold it, through an aligned buffer."""
    buffer = torch.empty(piece.stop - piece.start, dtype=torch.uint8)
    view = buffer.numpy().data
    for start, content in window:
        begin, end = max(piece.start, start), min(piece.stop, start + len(content))
        if begin < end:
            view[begin - piece.start : end - piece.start] = content[begin - start : end - start]
    piece.target.copy_(buffer.view(piece.target.dtype).view(piece.rows_shape)[piece.source_slices])


class _BlockReader:
    """Reader of a file in verified blocks."""

    def __init__(self, path: ObjectPath, checksum: FileChecksum) -> None:
        self.path, self._checksum = path, checksum

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to before `stop`, at once."""
        size = self._checksum.block_bytes
        first, last = start // size, -(-stop // size)
        return self._read_blocks(range(first, last))[1][start - first * size : stop - first * size]

    def read_ranges(self, pieces: Sequence[_Piece]) -> Iterator[tuple[int, memoryview]]:
        """Yield (start, content) of the blocks that hold the pieces, in order; several are requested at once."""
        with ThreadPoolExecutor(_REQUESTS_IN_FLIGHT, thread_name_prefix="checkpoint-reader") as pool:
            pending: deque[Future[tuple[int, memoryview]]] = deque()
            for blocks in self._group_blocks(pieces):
                pending.append(pool.submit(self._read_blocks, blocks))
                if len(pending) == _REQUESTS_IN_FLIGHT:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _group_blocks(self, pieces: Sequence[_Piece]) -> Iterator[range]:
        """Yield groups of consecutive blocks, each block once, by ascending number."""
        size, next_block = self._checksum.block_bytes, 0
        group = range(0)
        for piece in pieces:
            for block in range(max(next_block, piece.start // size), -(-piece.stop // size)):
                if len(group) == _BLOCKS_PER_REQUEST or (group and group.stop != block):
                    yield group
                    group = range(0)
                group = range(group.start if group else block, block + 1)
                next_block = block + 1
        if group:
            yield group

    def _read_blocks(self, blocks: range) -> tuple[int, memoryview]:
        """Return offset and content of consecutive blocks. Raises CheckpointCorruptedError or CheckpointError."""
        checksum, size = self._checksum, self._checksum.block_bytes
        start, stop = blocks.start * size, min(blocks.stop * size, checksum.bytes)
        try:
            content = self.path.read_range(start, stop)
        except FileNotFoundError as error:
            raise CheckpointCorruptedError(f"{self.path}: missing") from error
        except OSError as error:
            raise CheckpointCorruptedError(describe_read_error(self.path, error)) from error
        for block in blocks:
            piece = content[(block - blocks.start) * size : (block - blocks.start + 1) * size]
            if not checksum.matches_block(block, piece):
                raise CheckpointCorruptedError(
                    f"{self.path}: the block at byte {block * size} does not match the manifest"
                )
        return start, content
