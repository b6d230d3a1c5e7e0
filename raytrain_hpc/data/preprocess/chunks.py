"""A piece of the input as tokens, on its way to the shards: written by whoever encodes it, read once in order.

chunk-000012.arrow   Arrow IPC file; each record batch has one row of the columns of a shard (see shards.py)
chunk-000012.json    what it holds; a chunk without it is none
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_hpc.data.dataset.token_shards import Ints
from raytrain_hpc.data.preprocess.input_files import TextFields
from raytrain_hpc.data.preprocess.partition import InputPartition, compute_checksum
from raytrain_hpc.data.preprocess.readers import DocumentReader, TextSpan
from raytrain_hpc.data.tokenizer.base import ByteTokenizer, Tokenizer, collect_characters, tokenizer_from_json

_BATCH_TOKENS = 1 << 20
_BATCH_CHARS = 1 << 16
_BATCH_SPANS = 1 << 10

Columns = tuple[npt.NDArray[Any], Ints, npt.NDArray[np.uint8] | None]  # tokens, ends, counted


@dataclass(frozen=True)
class ChunkReport:
    """What a chunk holds. `checksums`: of the parts of its piece; `empty`: documents left out as they had no text."""

    piece: int
    tokens: int
    characters: int
    empty: int
    checksums: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def report_from_json(data: dict[str, Any]) -> ChunkReport:
    """Read what `Report.to_json` wrote. TypeError where it is not that."""
    return ChunkReport(**{**data, "checksums": tuple(data["checksums"])})


def get_chunk_path(directory: Path, partition: int) -> Path:
    """Where the tokens of a piece are kept."""
    return directory / f"chunk-{partition:06d}.arrow"


def write_chunk(
    directory: Path, partition: InputPartition, tokenizer: Tokenizer, fields: TextFields, dtype: str
) -> ChunkReport:
    """Encode a piece and publish its chunk, complete or not at all, in bounded memory. Replaces one that is there.

    DataError for an input that cannot be used, OSError where the directory cannot be written.
    """
    final = get_chunk_path(directory, partition.index)
    partial = final.with_name(f"{final.name}.{secrets.token_hex(4)}")  # of two writers, neither sees the other's
    try:
        with partial.open("xb") as file:
            writer = _ChunkWriter(file, dtype, masked=fields.has_pairs)
            empty = _encode_partition(partition, tokenizer, fields, writer)
            writer.close()
            file.flush()
            os.fsync(file.fileno())
        checksums = tuple(compute_checksum(part) for part in partition.ranges)
        report = ChunkReport(partition.index, writer.tokens, writer.characters, empty, checksums)
        partial.replace(final)
        write_json_atomically(final.with_suffix(".json"), report.to_json())
    finally:
        partial.unlink(missing_ok=True)
    return report


def read_reports(directory: Path) -> dict[int, ChunkReport]:
    """The reports of all chunks that are there, by piece."""
    found = [report_from_json(json.loads(path.read_text())) for path in directory.glob("chunk-*.json")]
    return {report.piece: report for report in found}


def read_chunk(path: Path) -> Iterator[Columns]:
    """The columns of a chunk, batch by batch."""
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            columns = [column.values.to_numpy(zero_copy_only=True) for column in batch.columns]
            yield columns[0], columns[1], columns[2] if len(columns) == 3 else None


def write_json_atomically(path: Path, data: Any) -> None:
    """Write a JSON file that is there complete or not at all. OSError where that fails."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("x", encoding="utf-8") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _encode_partition(partition: InputPartition, tokenizer: Tokenizer, fields: TextFields, writer: _ChunkWriter) -> int:
    """Encode the documents of a piece; return how many were empty."""
    empty = 0
    for part in partition.ranges:
        reader = DocumentReader(part, fields, allow_invalid_utf8=tokenizer.name == ByteTokenizer.name)
        for stretches in _batch_spans(reader.read_spans()):
            writer.append(stretches, tokenizer)
        empty += reader.num_empty
    return empty


def _batch_spans(spans: Iterator[TextSpan]) -> Iterator[list[TextSpan]]:
    """Enough at once that the tokenizer's cost of a call does not matter, little enough that memory does not."""
    batch: list[TextSpan] = []
    size = 0
    for stretch in spans:
        batch.append(stretch)
        size += len(stretch.text)
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_SPANS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _ChunkWriter:
    """Appends stretches of text as tokens to an Arrow file, a record batch at a time."""

    def __init__(self, file: Any, dtype: str, *, masked: bool):
        self._file, self._dtype, self._masked = file, np.dtype(dtype), masked
        self._writer: Any = None
        self._batches: list[tuple[npt.NDArray[Any], Ints, npt.NDArray[np.uint8]]] = []
        self.tokens, self.characters = 0, 0
        self._num_pending_tokens = 0  # tokens held

    def append(self, spans: Sequence[TextSpan], tokenizer: Tokenizer) -> None:
        """Encode stretches, each last one followed by the end of text."""
        end = tokenizer.end_of_text
        closing = np.array([] if end is None else [end], dtype=np.int64)
        encoded = tokenizer.encode_batch([stretch.text for stretch in spans])
        parts = [part for s, ids in zip(spans, encoded, strict=True) for part in (ids, closing[: s.ends_document])]
        sizes = [ids.size + (closing.size if s.ends_document else 0) for s, ids in zip(spans, encoded, strict=True)]
        stops = np.cumsum(sizes, dtype=np.int64)
        last = np.array([stretch.ends_document for stretch in spans])
        counted = np.repeat(np.array([s.is_target for s in spans], dtype=np.uint8), sizes if self._masked else 0)
        tokens = np.concatenate(parts).astype(self._dtype)
        self._batches.append((tokens, stops[last] + self._num_pending_tokens, counted))
        self._num_pending_tokens += tokens.size
        self.tokens += tokens.size
        self.characters += sum(len(stretch.text) for stretch in spans)
        if self._num_pending_tokens >= _BATCH_TOKENS:
            self._flush()

    def close(self) -> None:
        """Write what is held, and the end of the file; an empty chunk has a batch too."""
        if self._batches or self._writer is None:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        none = (np.empty(0, self._dtype), np.empty(0, np.int64), np.empty(0, np.uint8))
        columns = [np.concatenate(parts) for parts in zip(*(self._batches or [none]), strict=True)]
        names = ["tokens", "ends", "counted"] if self._masked else ["tokens", "ends"]
        rows = [
            pa.LargeListArray.from_arrays(pa.array([0, values.size], pa.int64()), pa.array(values))
            for values in columns[: len(names)]
        ]
        batch = pa.record_batch(rows, names=names)
        self._writer = self._writer or pa.ipc.new_file(self._file, batch.schema)
        self._writer.write_batch(batch)
        self._batches, self._num_pending_tokens = [], 0


@dataclass(frozen=True)
class EncodeTask:
    """Encodes pieces into chunks wherever it is sent; `tokenizer` is the file with the tokenizer's JSON form."""

    directory: Path
    tokenizer_path: Path
    fields: TextFields
    dtype: str

    def __call__(self, partition: InputPartition) -> dict[str, Any]:
        """The report of the chunk, as JSON values."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # pieces are what runs in parallel
        tokenizer = _load_stored_tokenizer(self.tokenizer_path, self.tokenizer_path.stat().st_mtime_ns)
        return write_chunk(self.directory, partition, tokenizer, self.fields, self.dtype).to_json()


@dataclass(frozen=True)
class CollectCharactersTask:
    """Finds the characters in a piece, sorted: what a char tokenizer's vocabulary is made of."""

    fields: TextFields

    def __call__(self, partition: InputPartition) -> str:
        """Every character of the piece's documents, once."""
        readers = [DocumentReader(part, self.fields) for part in partition.ranges]
        return collect_characters(stretch.text for reader in readers for stretch in reader.read_spans())


@lru_cache(maxsize=1)
def _load_stored_tokenizer(path: Path, mtime_ns: int) -> Tokenizer:
    """Read once a process: a large vocabulary takes longer to load than a piece to encode."""
    return tokenizer_from_json(json.loads(path.read_text(encoding="utf-8")))
