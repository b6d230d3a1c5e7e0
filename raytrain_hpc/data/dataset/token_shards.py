"""Shards of tokens: written once, then read as one flat memory-mapped array a split.

A shard is an uncompressed Arrow IPC *file* with one record batch of one row, so that every column is one contiguous
buffer that numpy can look at in place:

    tokens    large_list<uint16 or uint32>
    ends      large_list<int64>, positions in this shard after the last token of each document that ends in it
    counted   large_list<uint8>, only where the manifest says masked: 1 for a token that counts as a target
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_hpc.data.dataset.manifest import Manifest, Shard, Split, compute_file_sha256
from raytrain_hpc.data.dataset.remote_shards import RemoteShard
from raytrain_hpc.data.dataset.storage import Location, RemoteFile, parse_location
from raytrain_hpc.errors import DataError

DTYPES = ("uint16", "uint32")
MAX_CONCURRENT_REQUESTS = 16  # to an object store, of one read
Ints = npt.NDArray[np.int64]
SliceCopy = tuple[npt.NDArray[Any], Any, int]  # what to fill, the column that has it, and where in that
Bools = npt.NDArray[np.bool_]


def choose_token_dtype(vocab_size: int) -> str:
    """The smallest stored type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenSource(Protocol):
    """A flat array of tokens, cut into documents, from which windows are read."""

    @property
    def num_tokens(self) -> int:
        """Length of the array."""

    @property
    def num_documents(self) -> int:
        """Documents in it; 0 where it knows of none."""

    @property
    def masked(self) -> bool:
        """Whether some tokens do not count as targets."""

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """Windows [start, start + length), integers [n, length] of the stored type, for starts int64[n]."""

    def read_document_ids(self, starts: Ints, length: int) -> Ints:
        """Of the same windows, how many documents ended before each position, int64[n, length]: 0 in the first one."""

    def read_loss_mask(self, starts: Ints, length: int) -> Bools:
        """Of the same windows, whether each token counts as a target, bool[n, length]."""

    def get_document_spans(self, documents: Ints) -> tuple[Ints, Ints]:
        """First position of each numbered document and the one after its last, int64[n] both."""


class ShardWriter:
    """Writes one split as shards of `shard_tokens` tokens. Holds one shard in memory, whatever the split's size."""

    def __init__(
        self,
        directory: Path,
        split: str,
        dtype: str,
        shard_tokens: int,
        *,
        masked: bool = False,
        finished_shards: Sequence[Shard] = (),
        on_shard: Callable[[Shard], None] = lambda shard: None,
    ):
        """`finished`: shards of this split that are there already, to go on after; `on_shard` hears of each new one."""
        if shard_tokens < 1:
            raise DataError(f"shard_tokens={shard_tokens}: must be at least 1")
        self._directory, self._split = directory, split
        self._buffer: npt.NDArray[Any] = np.empty(shard_tokens, dtype=dtype)
        self._loss_mask = np.empty(shard_tokens, dtype=np.uint8) if masked else None
        self._ends: list[Ints] = []
        self._num_buffered = 0
        self._in_document = False  # whether a document has begun and not ended
        self._shards = list(finished_shards)
        self._on_shard = on_shard

    def append(
        self, tokens: npt.NDArray[Any], ends: npt.ArrayLike = (), loss_mask: npt.NDArray[Any] | None = None
    ) -> None:
        """Add tokens, integer[n], to the end of the split. They must fit the writer's dtype.

        `ends`: ascending positions in (0, n] after the last tokens of documents; `counted`: integer[n] of 0 and 1,
        where the writer is masked.
        """
        ends = np.asarray(ends, dtype=np.int64)
        if tokens.size:
            self._in_document = not ends.size or int(ends[-1]) < tokens.size
        while tokens.size:
            taken = min(tokens.size, self._buffer.size - self._num_buffered)
            place = slice(self._num_buffered, self._num_buffered + taken)
            self._buffer[place] = tokens[:taken]
            if self._loss_mask is not None and loss_mask is not None:
                self._loss_mask[place], loss_mask = loss_mask[:taken], loss_mask[taken:]
            inside = int(np.searchsorted(ends, taken, side="right"))
            self._ends.append(ends[:inside] + self._num_buffered)
            self._num_buffered += taken
            tokens, ends = tokens[taken:], ends[inside:] - taken
            if self._num_buffered == self._buffer.size and tokens.size:
                self._flush()

    def close(self) -> Split:
        """Write what is left and return the finished split, whose end is the end of its last document."""
        if self._num_buffered:
            if self._in_document:
                self._ends.append(np.array([self._num_buffered], dtype=np.int64))
            self._flush()
        shards = tuple(self._shards)
        return Split(sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards), shards)

    def _flush(self) -> None:
        path = self._directory / f"{self._split}-{len(self._shards):05d}.arrow"
        ends = np.concatenate(self._ends) if self._ends else np.empty(0, dtype=np.int64)
        columns = {"tokens": self._buffer[: self._num_buffered], "ends": ends}
        if self._loss_mask is not None:
            columns["counted"] = self._loss_mask[: self._num_buffered]
        write_shard(path, columns)
        offset = _find_token_offset(path)
        self._shards.append(
            Shard(path.name, self._num_buffered, ends.size, offset, path.stat().st_size, compute_file_sha256(path))
        )
        self._num_buffered, self._ends = 0, []
        self._on_shard(self._shards[-1])


def write_shard(path: Path, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Write a shard's columns to a new file, synced. OSError where that fails."""
    rows = [
        pa.LargeListArray.from_arrays(pa.array([0, values.size], pa.int64()), pa.array(values))
        for values in columns.values()
    ]
    batch = pa.record_batch(rows, names=list(columns))
    with path.open("xb") as file:
        with pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())


def _find_token_offset(path: Path) -> int:
    """Byte of the file at which its tokens begin."""
    with pa.memory_map(str(path)) as source:
        whole = source.read_buffer()
        tokens = pa.ipc.open_file(whole).get_batch(0).column("tokens").values
        return int(tokens.buffers()[1].address - whole.address)


@dataclass(frozen=True)
class ShardFile:
    """Where a shard is and what the manifest says of it."""

    path: Path | RemoteFile
    tokens: int
    documents: int
    offset: int = 0  # byte at which the tokens begin; only where shards are read by ranges


class TokenArray:
    """Shards, one after the other, as one flat array. Shards are mapped when first read; pickling keeps the paths."""

    def __init__(self, files: Sequence[ShardFile], dtype: str, *, masked: bool = False):
        if dtype not in DTYPES:
            raise DataError(f"dtype={dtype!r}: tokens are stored as {' or '.join(DTYPES)}")
        self._files = tuple(files)
        self._dtype, self.masked = dtype, masked
        # _ends[i]: position after the last token of shard i; searching it finds the shard of a position.
        self._shard_stops = np.cumsum([file.tokens for file in self._files], dtype=np.int64)
        self._num_tokens = int(self._shard_stops[-1]) if len(self._shard_stops) else 0
        self._document_stops = np.cumsum([file.documents for file in self._files], dtype=np.int64)
        self._shards: dict[int, ShardColumns] = {}
        self._column_cache: dict[str, dict[int, tuple[Any, int, int]]] = {}
        self._has_remote_shards = any(isinstance(file.path, RemoteFile) for file in self._files)

    @classmethod
    def open(cls, directory: Location | str, manifest: Manifest, split: str) -> TokenArray:
        """One split of a dataset. DataError where the dataset has no such split."""
        directory = parse_location(directory) if isinstance(directory, str) else directory
        if split not in manifest.splits:
            raise DataError(f"{directory}: has no split {split!r}, only {', '.join(manifest.splits)}")
        shards = manifest.splits[split].shards
        files = [ShardFile(directory / s.file, s.tokens, s.documents, s.offset) for s in shards]
        return cls(files, manifest.dtype, masked=manifest.masked)

    def __add__(self, other: TokenArray) -> TokenArray:
        """This array followed by another one of the same kind."""
        if (self._dtype, self.masked) != (other._dtype, other.masked):
            raise DataError(f"token arrays of {self._dtype} and {other._dtype}, or with and without a mask, do not mix")
        return TokenArray(self._files + other._files, self._dtype, masked=self.masked)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_token_array, (self._files, self._dtype, self.masked)

    @property
    def num_tokens(self) -> int:
        """Length of the array."""
        return self._num_tokens

    @property
    def num_documents(self) -> int:
        """Documents that end in it: all, the end of a split being the end of a document."""
        return int(self._document_stops[-1]) if len(self._document_stops) else 0

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """As `TokenSource.read`. DataError outside the array."""
        out = np.empty((len(starts), length), dtype=self._dtype)
        self._gather("tokens", starts, out)
        return out

    def read_loss_mask(self, starts: Ints, length: int) -> Bools:
        """As `TokenSource.counted`. DataError outside the array."""
        out = np.ones((len(starts), length), dtype=bool)
        if self.masked:
            self._gather("counted", starts, out)
        return out

    def read_document_ids(self, starts: Ints, length: int) -> Ints:
        """As `TokenSource.documents`. DataError outside the array."""
        marks = np.zeros((len(starts), length), dtype=np.int64)
        found = self._find_shards(starts, length) if length else ()
        for row, start, shard in zip(marks, starts.tolist(), list(found), strict=False):
            position, stop = start, start + length
            while position < stop:
                ends, begin = self._get_shard(shard).ends, int(self._shard_stops[shard]) - self._files[shard].tokens
                # An end at the window's first position, or after its last, divides nothing in it.
                low, high = np.searchsorted(ends, (start - begin, stop - begin), side="right")
                inside = ends[low:high] + (begin - start)
                row[inside[inside < length]] = 1
                position, shard = int(self._shard_stops[shard]), shard + 1
        return np.cumsum(marks, axis=1)

    def get_document_spans(self, documents: Ints) -> tuple[Ints, Ints]:
        """As `TokenSource.spans`. DataError for a number that no document has."""
        documents = np.asarray(documents, dtype=np.int64)
        if documents.size and not 0 <= int(documents.min()) <= int(documents.max()) < self.num_documents:
            raise DataError(f"document {documents.min()}..{documents.max()}: there are {self.num_documents}")
        stops = self._get_document_stops(documents)
        starts = np.zeros_like(stops)
        later = documents > 0
        starts[later] = self._get_document_stops(documents[later] - 1)
        return starts, stops

    def _get_document_stops(self, documents: Ints) -> Ints:
        shards = np.searchsorted(self._document_stops, documents, side="right")
        found = np.empty_like(documents)
        for shard in np.unique(shards).tolist():
            mine, file = shards == shard, self._files[shard]
            first = int(self._document_stops[shard]) - file.documents
            found[mine] = (
                self._get_shard(shard).ends[documents[mine] - first] + int(self._shard_stops[shard]) - file.tokens
            )
        return found

    def _find_shards(self, starts: Ints, length: int) -> Ints:
        """The shard in which each window begins, int64[n]. DataError for one outside the array."""
        if not starts.size:
            return np.empty(0, dtype=np.int64)
        first, last = int(starts.min()), int(starts.max())
        if first < 0 or last + length > self.num_tokens:
            raise DataError(f"window of {length} tokens at {first}..{last} leaves the {self.num_tokens} tokens")
        return self._shard_stops.searchsorted(starts, side="right").astype(np.int64)

    def _gather(self, column: str, starts: Ints, out: npt.NDArray[Any]) -> None:
        """Fill the rows of `out` from a column: of each shard in one call, which is quick and lets other threads work;
        what runs through several shards, or comes from elsewhere, slice by slice."""
        columns, length = self._column_cache.setdefault(column, {}), out.shape[1]
        shards = self._find_shards(starts, length)
        within = (
            starts + length <= self._shard_stops[shards]
            if not self._has_remote_shards
            else np.zeros(len(starts), dtype=bool)
        )
        for shard in np.unique(shards[within]).tolist():
            held, begin, _ = columns.get(shard) or self._get_column(column, shard)
            rows = np.flatnonzero(within & (shards == shard))
            out[rows] = _view_windows(held, length)[starts[rows] - begin]
        pieces = [
            piece
            for row in np.flatnonzero(~within).tolist()
            for piece in self._plan_copies(column, out[row], int(starts[row]), int(shards[row]))
        ]
        if self._has_remote_shards and pieces:
            # What costs is the way there and back: many are on it at once.
            with ThreadPoolExecutor(min(MAX_CONCURRENT_REQUESTS, len(pieces))) as pool:
                list(pool.map(_copy_slice, pieces))
        else:
            for piece in pieces:
                _copy_slice(piece)

    def _plan_copies(self, column: str, row: npt.NDArray[Any], start: int, shard: int) -> Iterator[SliceCopy]:
        """What fills a row: a slice of each shard that it runs through."""
        while row.size:
            held, begin, end = self._get_column(column, shard)
            size = min(row.size, end - start)
            yield row[:size], held, start - begin
            row, start, shard = row[size:], end, shard + 1

    def _get_column(self, name: str, shard: int) -> tuple[Any, int, int]:
        """A column of a shard, its first position in the array and the one after its last."""
        end = int(self._shard_stops[shard])
        found = getattr(self._get_shard(shard), name), end - self._files[shard].tokens, end
        self._column_cache[name][shard] = found
        return found

    def _get_shard(self, index: int) -> ShardColumns:
        if index not in self._shards:
            file = self._files[index]
            if isinstance(file.path, RemoteFile):
                ranged = RemoteShard(file.path, file.offset, self._dtype, masked=self.masked)
                self._shards[index] = ranged
            else:
                self._shards[index] = map_shard(file, self._dtype, masked=self.masked)
        return self._shards[index]


def _view_windows(column: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Every run of `length` elements of a flat array, in place, [n - length + 1, length]."""
    shape, width = (column.size - length + 1, length), column.itemsize
    return np.ndarray(shape, column.dtype, buffer=column, strides=(width, width))


def _copy_slice(copy: SliceCopy) -> None:
    row, held, offset = copy
    row[:] = held[offset : offset + row.size]


def _rebuild_token_array(files: tuple[ShardFile, ...], dtype: str, masked: bool) -> TokenArray:
    return TokenArray(files, dtype, masked=masked)


class ShardColumns(Protocol):
    """The columns of a shard: sliced, they give arrays."""

    @property
    def tokens(self) -> Any:
        """The tokens."""

    @property
    def ends(self) -> Ints:
        """Where documents end."""

    @property
    def counted(self) -> Any:
        """Which tokens count; empty without a mask."""


@dataclass(frozen=True, eq=False)
class MappedShard:
    """The columns of a shard, in place and read-only; `counted` is empty without a mask."""

    tokens: npt.NDArray[Any]
    ends: Ints
    counted: npt.NDArray[Any]


def map_shard(file: ShardFile, dtype: str, *, masked: bool) -> MappedShard:
    """Look at a shard in place. DataError where the file is not what the manifest says."""
    names = ["tokens", "ends", *(["counted"] if masked else [])]
    try:
        # Closing the file keeps the mapping (the array refers to it) and frees the descriptor: a large dataset has
        # more shards than a process may have files open.
        with pa.memory_map(str(file.path)) as source:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        columns = [batches[0].column(name).values.to_numpy(zero_copy_only=True) for name in names]
    except (OSError, pa.ArrowException, KeyError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{file.path}: not a readable shard ({reason}); prepare the dataset again") from error
    tokens, ends = columns[:2]
    counted = columns[2] if masked else np.empty(0, dtype=np.uint8)
    found = (len(batches), batches[0].num_rows, tokens.dtype, tokens.size, ends.size, counted.size)
    if found != (1, 1, np.dtype(dtype), file.tokens, file.documents, file.tokens if masked else 0):
        raise DataError(
            f"{file.path}: holds {tokens.size} tokens of {tokens.dtype} in {ends.size} documents instead of "
            f"{file.tokens} of {dtype} in {file.documents}; prepare the dataset again"
        )
    return MappedShard(tokens, ends, counted)
