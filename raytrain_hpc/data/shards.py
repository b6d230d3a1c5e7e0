"""Shards of tokens: written once, then read as one flat memory-mapped array a split.

A shard is an uncompressed Arrow IPC *file* with one column `tokens` in one record batch, so the whole shard is one
contiguous buffer that numpy can look at in place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_hpc.data.manifest import Manifest, Shard, Split, file_sha256
from raytrain_hpc.errors import DataError

COLUMN = "tokens"
DTYPES = ("uint16", "uint32")


def token_dtype(vocab_size: int) -> str:
    """The smallest stored type that holds every id of the vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class TokenSource(Protocol):
    """A flat array of tokens from which windows are read."""

    @property
    def num_tokens(self) -> int:
        """Length of the array."""

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Windows [start, start + length), int64[n, length], for starts int64[n]."""


class ShardWriter:
    """Writes one split as shards of `shard_tokens` tokens. Holds one shard in memory, whatever the split's size."""

    def __init__(self, directory: Path, split: str, dtype: str, shard_tokens: int):
        if shard_tokens < 1:
            raise DataError(f"shard_tokens={shard_tokens}: must be at least 1")
        self._directory, self._split = directory, split
        self._buffer: npt.NDArray[Any] = np.empty(shard_tokens, dtype=dtype)
        self._filled = 0
        self._shards: list[Shard] = []

    def append(self, tokens: npt.NDArray[Any]) -> None:
        """Add tokens, integer[n], to the end of the split. They must fit the writer's dtype."""
        while tokens.size:
            taken = tokens[: self._buffer.size - self._filled]
            self._buffer[self._filled : self._filled + taken.size] = taken
            self._filled += taken.size
            tokens = tokens[taken.size :]
            if self._filled == self._buffer.size:
                self._flush()

    def close(self) -> Split:
        """Write what is left and return the finished split."""
        if self._filled:
            self._flush()
        return Split(sum(shard.tokens for shard in self._shards), tuple(self._shards))

    def _flush(self) -> None:
        path = self._directory / f"{self._split}-{len(self._shards):05d}.arrow"
        batch = pa.record_batch([pa.array(self._buffer[: self._filled])], names=[COLUMN])
        with path.open("xb") as file:
            with pa.ipc.new_file(file, batch.schema) as writer:
                writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        self._shards.append(Shard(path.name, self._filled, path.stat().st_size, file_sha256(path)))
        self._filled = 0


class TokenArray:
    """Shards, one after the other, as one flat array. Shards are mapped when first read; pickling keeps the paths."""

    def __init__(self, files: Sequence[tuple[Path, int]], dtype: str):
        """`files`: path and number of tokens of each shard, in order."""
        if dtype not in DTYPES:
            raise DataError(f"dtype={dtype!r}: tokens are stored as {' or '.join(DTYPES)}")
        self._files = tuple(files)
        self._dtype = dtype
        # _ends[i]: position after the last token of shard i; searching it finds the shard of a position.
        self._ends = np.cumsum([tokens for _, tokens in self._files], dtype=np.int64)
        self._mapped: dict[int, npt.NDArray[Any]] = {}

    @classmethod
    def open(cls, directory: Path | str, manifest: Manifest, split: str) -> TokenArray:
        """One split of a dataset. DataError where the dataset has no such split."""
        if split not in manifest.splits:
            raise DataError(f"{directory}: has no split {split!r}, only {', '.join(manifest.splits)}")
        directory = Path(directory)
        return cls([(directory / s.file, s.tokens) for s in manifest.splits[split].shards], manifest.dtype)

    def __add__(self, other: TokenArray) -> TokenArray:
        """This array followed by another one of the same dtype."""
        if self._dtype != other._dtype:
            raise DataError(f"token arrays of {self._dtype} and {other._dtype} cannot follow each other")
        return TokenArray(self._files + other._files, self._dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenArray, (self._files, self._dtype)

    @property
    def num_tokens(self) -> int:
        """Length of the array."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Windows [start, start + length), int64[n, length], for starts int64[n]. DataError outside the array."""
        starts = np.asarray(starts, dtype=np.int64)
        out = np.empty((starts.size, length), dtype=np.int64)
        if not out.size:
            return out
        if int(starts.min()) < 0 or int(starts.max()) + length > self.num_tokens:
            raise DataError(
                f"window of {length} tokens at {starts.min()}..{starts.max()} leaves the {self.num_tokens} tokens"
            )
        shards = np.searchsorted(self._ends, starts, side="right")
        # A slice a window: the copy is what costs, and three times faster than gathering single positions.
        for row, start, shard in zip(out, starts.tolist(), shards.tolist(), strict=True):
            tokens = self._shard(shard)
            offset = start - int(self._ends[shard]) + tokens.size
            piece = tokens[offset : offset + length]
            row[: piece.size] = piece
            if piece.size < length:
                self._fill(row[piece.size :], shard + 1)
        return out

    def _fill(self, rest: npt.NDArray[np.int64], shard: int) -> None:
        """Fill `rest` from the beginning of `shard` on."""
        while rest.size:
            piece = self._shard(shard)[: rest.size]
            rest[: piece.size] = piece
            rest, shard = rest[piece.size :], shard + 1

    def _shard(self, index: int) -> npt.NDArray[Any]:
        if index not in self._mapped:
            self._mapped[index] = map_shard(*self._files[index], self._dtype)
        return self._mapped[index]


def map_shard(path: Path, num_tokens: int, dtype: str) -> npt.NDArray[Any]:
    """The tokens of one shard, dtype[num_tokens], read-only and in place. DataError where the file is not that."""
    try:
        # Closing the file keeps the mapping (the array refers to it) and frees the descriptor: a large dataset has
        # more shards than a process may have files open.
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        tokens: npt.NDArray[Any] = batches[0].column(COLUMN).to_numpy(zero_copy_only=True)
    except (OSError, pa.ArrowException, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: not a readable shard ({reason}); prepare the dataset again") from error
    if len(batches) != 1 or tokens.dtype != dtype or tokens.size != num_tokens:
        raise DataError(
            f"{path}: holds {tokens.size} tokens of {tokens.dtype} in {len(batches)} batches instead of {num_tokens} "
            f"of {dtype} in one; prepare the dataset again"
        )
    return tokens
