"""Token shards: written once, then read as one flat memory-mapped array per split.

A shard is an uncompressed Arrow IPC *file* with one record batch of one row, so that every column is one contiguous
buffer that numpy can view without a copy:

    tokens    large_list<uint16 or uint32>
    ends      large_list<int64>, positions in this shard after the last token of each document that ends in it
    counted   large_list<uint8>, the loss mask, only if the manifest is masked: 1 if the token counts as a target
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_hpc.data.dataset.manifest import Manifest, Shard, Split, compute_file_sha256
from raytrain_hpc.data.dataset.mapped_shards import ShardFile, map_shard
from raytrain_hpc.data.dataset.remote_shards import RemoteShard
from raytrain_hpc.data.dataset.storage import MAX_CONCURRENT_REQUESTS, Location, RemoteFile, parse_location
from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import NO_RETRY, ReadRetry

DTYPES = ("uint16", "uint32")
Ints = npt.NDArray[np.int64]
SliceCopy = tuple[npt.NDArray[Any], Any, int]  # destination, source column, offset in the column
Bools = npt.NDArray[np.bool_]


def choose_token_dtype(vocab_size: int) -> str:
    """Choose the smallest stored dtype that holds every token id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenSource(Protocol):
    """Flat array of tokens, divided into documents, from which windows are read."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""

    @property
    def num_documents(self) -> int:
        """Number of documents; 0 if boundaries are unknown."""

    @property
    def masked(self) -> bool:
        """Whether a loss mask excludes some tokens as targets."""

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """Read windows [start, start + length) for starts int64[n] as [n, length] in the stored dtype."""

    def read_document_ids(self, starts: Ints, length: int) -> Ints:
        """Return the document of each token, int64[n, length], numbered from 0 in each window."""

    def read_loss_mask(self, starts: Ints, length: int) -> Bools:
        """Read whether each token of the windows counts as a target, bool[n, length]."""

    def get_document_spans(self, documents: Ints) -> tuple[Ints, Ints]:
        """Return start and stop position of each of the numbered documents, int64[n] each."""


class ShardWriter:
    """Writer of one split as shards of `shard_tokens` tokens. Buffers one shard in memory."""

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
        """Continue after `finished_shards`, those already written; call `on_shard` after each new shard."""
        if shard_tokens < 1:
            raise DataError(f"shard_tokens={shard_tokens}: must be at least 1")
        self._directory, self._split = directory, split
        self._buffer: npt.NDArray[Any] = np.empty(shard_tokens, dtype=dtype)
        self._loss_mask = np.empty(shard_tokens, dtype=np.uint8) if masked else None
        self._ends: list[Ints] = []
        self._num_buffered = 0
        self._in_document = False  # whether the last document is unfinished
        self._shards = list(finished_shards)
        self._on_shard = on_shard

    def append(
        self, tokens: npt.NDArray[Any], ends: npt.ArrayLike = (), loss_mask: npt.NDArray[Any] | None = None
    ) -> None:
        """Append tokens, integer[n], to the split. They must fit the writer's dtype.

        `ends`: ascending positions in (0, n] after the last tokens of documents. `loss_mask`: integer[n] of 0 and 1,
        if the writer is masked.
        """
        ends = np.asarray(ends, dtype=np.int64)
        if tokens.size:
            self._in_document = not ends.size or int(ends[-1]) < tokens.size
        while tokens.size:
            count = min(tokens.size, self._buffer.size - self._num_buffered)
            target = slice(self._num_buffered, self._num_buffered + count)
            self._buffer[target] = tokens[:count]
            if self._loss_mask is not None and loss_mask is not None:
                self._loss_mask[target], loss_mask = loss_mask[:count], loss_mask[count:]
            num_ends = int(np.searchsorted(ends, count, side="right"))
            self._ends.append(ends[:num_ends] + self._num_buffered)
            self._num_buffered += count
            tokens, ends = tokens[count:], ends[num_ends:] - count
            if self._num_buffered == self._buffer.size and tokens.size:
                self._flush()

    def close(self) -> Split:
        """Flush the buffer and return the finished split. The end of the split also ends its last document."""
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
    """Write the columns of a shard to a new file and fsync it. Raises OSError on failure."""
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
    """Find the byte of the file at which its tokens begin."""
    with pa.memory_map(str(path)) as source:
        buffer = source.read_buffer()
        tokens = pa.ipc.open_file(buffer).get_batch(0).column("tokens").values
        return int(tokens.buffers()[1].address - buffer.address)


class TokenArray:
    """Shards as one flat array, mapped on first read; pickling keeps paths only. Without a loss mask, tokens count.

    `retry`: repeats reads that fail; a pickled copy repeats none. It covers the opening of a shard that is mapped.
    """

    def __init__(self, files: Sequence[ShardFile], dtype: str, retry: ReadRetry = NO_RETRY):
        if dtype not in DTYPES:
            raise DataError(f"dtype={dtype!r}: must be {' or '.join(DTYPES)}")
        self._files, self._retry = tuple(files), retry
        self._dtype, self.masked = dtype, any(file.masked for file in self._files)
        # _shard_stops[i]: position after the last token of shard i; a binary search finds the shard of a position.
        self._shard_stops = np.cumsum([file.tokens for file in self._files], dtype=np.int64)
        self._num_tokens = int(self._shard_stops[-1]) if len(self._shard_stops) else 0
        self._cumulative_documents = np.cumsum([file.documents for file in self._files], dtype=np.int64)
        self._shards: dict[int, ShardColumns] = {}
        self._column_cache: dict[str, dict[int, tuple[Any, int, int]]] = {}
        self._has_remote_shards = any(isinstance(file.path, RemoteFile) for file in self._files)

    @classmethod
    def open(cls, directory: Location | str, manifest: Manifest, split: str, retry: ReadRetry = NO_RETRY) -> TokenArray:
        """Open one split of a dataset. Raises DataError if the dataset has no such split."""
        directory = parse_location(directory) if isinstance(directory, str) else directory
        if split not in manifest.splits:
            raise DataError(f"{directory}: has no split {split!r}, only {', '.join(manifest.splits)}")
        shards = manifest.splits[split].shards
        files = [ShardFile(directory / s.file, s.tokens, s.documents, s.offset, manifest.masked) for s in shards]
        return cls(files, manifest.dtype, retry)

    def __add__(self, other: TokenArray) -> TokenArray:
        """Concatenate with an array of the same dtype. Raises DataError if they differ."""
        if self._dtype != other._dtype:
            raise DataError(f"cannot concatenate tokens of {self._dtype} and {other._dtype}")
        return TokenArray(self._files + other._files, self._dtype, self._retry)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenArray, (self._files, self._dtype)

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self._num_tokens

    @property
    def num_documents(self) -> int:
        """Number of documents. The end of a split always ends a document."""
        return int(self._cumulative_documents[-1]) if len(self._cumulative_documents) else 0

    def read(self, starts: Ints, length: int) -> npt.NDArray[Any]:
        """Implement `TokenSource.read`. Raises DataError if out of range."""
        out = np.empty((len(starts), length), dtype=self._dtype)
        self._gather("tokens", starts, out)
        return out

    def read_loss_mask(self, starts: Ints, length: int) -> Bools:
        """Implement `TokenSource.read_loss_mask`. Raises DataError if out of range."""
        out = np.ones((len(starts), length), dtype=bool)
        if self.masked:
            self._gather("counted", starts, out)
        return out

    def read_document_ids(self, starts: Ints, length: int) -> Ints:
        """Implement `TokenSource.read_document_ids`. Raises DataError if out of range."""
        marks = np.zeros((len(starts), length), dtype=np.int64)
        shards = self._find_shards(starts, length) if length else ()
        for row, start, shard in zip(marks, starts.tolist(), list(shards), strict=False):
            position, stop = start, start + length
            while position < stop:
                ends, offset = self._get_shard(shard).ends, int(self._shard_stops[shard]) - self._files[shard].tokens
                # Ends at the first position of the window, or after its last, do not separate tokens of it.
                low, high = np.searchsorted(ends, (start - offset, stop - offset), side="right")
                boundaries = ends[low:high] + (offset - start)
                row[boundaries[boundaries < length]] = 1
                position, shard = int(self._shard_stops[shard]), shard + 1
        return np.cumsum(marks, axis=1)

    def get_document_spans(self, documents: Ints) -> tuple[Ints, Ints]:
        """Implement `TokenSource.get_document_spans`. Raises DataError for a document that does not exist."""
        documents = np.asarray(documents, dtype=np.int64)
        if documents.size and not 0 <= int(documents.min()) <= int(documents.max()) < self.num_documents:
            raise DataError(
                f"document {documents.min()}..{documents.max()} out of range; there are {self.num_documents}"
            )
        stops = self._get_document_stops(documents)
        starts = np.zeros_like(stops)
        has_previous = documents > 0
        starts[has_previous] = self._get_document_stops(documents[has_previous] - 1)
        return starts, stops

    def _get_document_stops(self, documents: Ints) -> Ints:
        shards = np.searchsorted(self._cumulative_documents, documents, side="right")
        stops = np.empty_like(documents)
        for shard in np.unique(shards).tolist():
            rows, file = shards == shard, self._files[shard]
            first = int(self._cumulative_documents[shard]) - file.documents
            stops[rows] = (
                self._get_shard(shard).ends[documents[rows] - first] + int(self._shard_stops[shard]) - file.tokens
            )
        return stops

    def _find_shards(self, starts: Ints, length: int) -> Ints:
        """Find the shard in which each window begins, int64[n]. Raises DataError if out of range."""
        if not starts.size:
            return np.empty(0, dtype=np.int64)
        first, last = int(starts.min()), int(starts.max())
        if first < 0 or last + length > self.num_tokens:
            raise DataError(f"window of {length} tokens at {first}..{last} exceeds the {self.num_tokens} tokens")
        return self._shard_stops.searchsorted(starts, side="right").astype(np.int64)

    def _gather(self, column: str, starts: Ints, out: npt.NDArray[Any]) -> None:
        """Fill the rows of `out` from a column: one numpy call per local shard, which lets other threads run.

        Places of shards that lack the column are left as they are.
        Windows that span shards, and remote ones, are copied slice by slice.
        """
        columns, length = self._column_cache.setdefault(column, {}), out.shape[1]
        shards = self._find_shards(starts, length)
        is_inside = (
            starts + length <= self._shard_stops[shards]
            if not self._has_remote_shards
            else np.zeros(len(starts), dtype=bool)
        )
        for shard in filter(partial(self._has_column, column), np.unique(shards[is_inside]).tolist()):
            values, shard_start, _ = columns.get(shard) or self._get_column(column, shard)
            rows = np.flatnonzero(is_inside & (shards == shard))
            out[rows] = _view_windows(values, length)[starts[rows] - shard_start]
        copies = [
            copy
            for row in np.flatnonzero(~is_inside).tolist()
            for copy in self._plan_copies(column, out[row], int(starts[row]), int(shards[row]))
        ]
        if self._has_remote_shards and copies:
            # Latency dominates: send requests concurrently.
            with ThreadPoolExecutor(min(MAX_CONCURRENT_REQUESTS, len(copies))) as pool:
                list(pool.map(_copy_slice, copies))
        else:
            for copy in copies:
                _copy_slice(copy)

    def _plan_copies(self, column: str, row: npt.NDArray[Any], start: int, shard: int) -> Iterator[SliceCopy]:
        """Yield the copies that fill a row: one slice of each shard it spans."""
        while row.size:
            values, shard_start, shard_stop = self._get_column(column, shard)
            size = min(row.size, shard_stop - start)
            if self._has_column(column, shard):
                yield row[:size], values, start - shard_start
            row, start, shard = row[size:], shard_stop, shard + 1

    def _has_column(self, name: str, shard: int) -> bool:
        return name != "counted" or self._files[shard].masked

    def _get_column(self, name: str, shard: int) -> tuple[Any, int, int]:
        """Return a column of a shard, with the start and stop position of the shard in the array."""
        stop = int(self._shard_stops[shard])
        column = getattr(self._get_shard(shard), name), stop - self._files[shard].tokens, stop
        self._column_cache[name][shard] = column
        return column

    def _get_shard(self, index: int) -> ShardColumns:
        if index not in self._shards:
            file, dtype, retry = self._files[index], self._dtype, self._retry
            if isinstance(file.path, RemoteFile):
                remote_shard = RemoteShard(file.path, file.offset, dtype, masked=file.masked, retry=retry)
                self._shards[index] = remote_shard
            else:
                self._shards[index] = map_shard(file, dtype, masked=file.masked, retry=retry)
        return self._shards[index]


def _view_windows(column: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """View every window of `length` elements of a flat array, [n - length + 1, length], without a copy."""
    shape, stride = (column.size - length + 1, length), column.itemsize
    return np.ndarray(shape, column.dtype, buffer=column, strides=(stride, stride))


def _copy_slice(copy: SliceCopy) -> None:
    row, column, offset = copy
    row[:] = column[offset : offset + row.size]


class ShardColumns(Protocol):
    """Columns of a shard. Slicing a column returns an array."""

    @property
    def tokens(self) -> Any:
        """Tokens."""

    @property
    def ends(self) -> Ints:
        """Positions after the last token of each document."""

    @property
    def counted(self) -> Any:
        """Loss mask; empty if the dataset has none."""
