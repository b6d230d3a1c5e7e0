"""Chunks: the tokens of one input partition, written by the task that encodes it and read once by the assembly.

chunk-000012.arrow   Arrow IPC file; each record batch has one row of the columns of a shard (see token_shards.py)
chunk-000012.json    its report; a chunk without a report is incomplete
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
from raytrain_hpc.data.tokenizer.base import ByteTokenizer, Tokenizer, collect_characters
from raytrain_hpc.data.tokenizer.registry import tokenizer_from_json

_BATCH_TOKENS = 1 << 20
_BATCH_CHARS = 1 << 16
_BATCH_SPANS = 1 << 10

Columns = tuple[npt.NDArray[Any], Ints, npt.NDArray[np.uint8] | None]  # tokens, ends, counted


@dataclass(frozen=True)
class ChunkReport:
    """Contents of a chunk. `checksums`: one per file range of its partition; `empty`: skipped empty documents."""

    piece: int
    tokens: int
    characters: int
    empty: int
    checksums: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)


def report_from_json(data: dict[str, Any]) -> ChunkReport:
    """Parse the output of `ChunkReport.to_json`. Raises TypeError if it is malformed."""
    return ChunkReport(**{**data, "checksums": tuple(data["checksums"])})


def get_chunk_path(directory: Path, partition: int) -> Path:
    """Return the path of the chunk of a partition."""
    return directory / f"chunk-{partition:06d}.arrow"


def write_chunk(
    directory: Path, partition: InputPartition, tokenizer: Tokenizer, fields: TextFields, dtype: str
) -> ChunkReport:
    """Encode a partition and publish its chunk atomically, in bounded memory. Replaces an existing chunk.

    Raises DataError for unusable input, and OSError if the directory cannot be written.
    """
    final = get_chunk_path(directory, partition.index)
    partial = final.with_name(f"{final.name}.{secrets.token_hex(4)}")  # unique: concurrent writers do not collide
    try:
        with partial.open("xb") as file:
            writer = _ChunkWriter(file, dtype, masked=fields.has_pairs)
            empty = _encode_partition(partition, tokenizer, fields, writer)
            writer.close()
            file.flush()
            os.fsync(file.fileno())
        checksums = tuple(compute_checksum(file_range) for file_range in partition.ranges)
        report = ChunkReport(partition.index, writer.tokens, writer.characters, empty, checksums)
        partial.replace(final)
        write_json_atomically(final.with_suffix(".json"), report.to_json())
    finally:
        partial.unlink(missing_ok=True)
    return report


def read_reports(directory: Path) -> dict[int, ChunkReport]:
    """Read the reports of all existing chunks, by partition index."""
    reports = [report_from_json(json.loads(path.read_text())) for path in directory.glob("chunk-*.json")]
    return {report.piece: report for report in reports}


def read_chunk(path: Path) -> Iterator[Columns]:
    """Yield the columns of a chunk, batch by batch."""
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            columns = [column.values.to_numpy(zero_copy_only=True) for column in batch.columns]
            yield columns[0], columns[1], columns[2] if len(columns) == 3 else None


def write_json_atomically(path: Path, data: Any) -> None:
    """Write a JSON file atomically. Raises OSError on failure."""
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
    """Encode the documents of a partition; return the number of empty ones."""
    empty = 0
    for file_range in partition.ranges:
        reader = DocumentReader(file_range, fields, allow_invalid_utf8=tokenizer.name == ByteTokenizer.name)
        for spans in _batch_spans(reader.read_spans()):
            writer.append(spans, tokenizer)
        empty += reader.num_empty
    return empty


def _batch_spans(spans: Iterator[TextSpan]) -> Iterator[list[TextSpan]]:
    """Batch spans to amortize the tokenizer's cost per call in bounded memory."""
    batch: list[TextSpan] = []
    size = 0
    for span in spans:
        batch.append(span)
        size += len(span.text)
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_SPANS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _ChunkWriter:
    """Writer that encodes text spans and appends them to an Arrow file in record batches."""

    def __init__(self, file: Any, dtype: str, *, masked: bool):
        self._file, self._dtype, self._masked = file, np.dtype(dtype), masked
        self._writer: Any = None
        self._batches: list[tuple[npt.NDArray[Any], Ints, npt.NDArray[np.uint8]]] = []
        self.tokens, self.characters = 0, 0
        self._num_pending_tokens = 0  # not yet written

    def append(self, spans: Sequence[TextSpan], tokenizer: Tokenizer) -> None:
        """Encode spans and append them, with the end-of-text token after each document."""
        end = tokenizer.end_of_text
        end_tokens = np.array([] if end is None else [end], dtype=np.int64)
        encoded = tokenizer.encode_batch([span.text for span in spans])
        parts = [part for s, ids in zip(spans, encoded, strict=True) for part in (ids, end_tokens[: s.ends_document])]
        sizes = [ids.size + (end_tokens.size if s.ends_document else 0) for s, ids in zip(spans, encoded, strict=True)]
        stops = np.cumsum(sizes, dtype=np.int64)
        ends_document = np.array([span.ends_document for span in spans])
        counted = np.repeat(np.array([s.is_target for s in spans], dtype=np.uint8), sizes if self._masked else 0)
        tokens = np.concatenate(parts).astype(self._dtype)
        self._batches.append((tokens, stops[ends_document] + self._num_pending_tokens, counted))
        self._num_pending_tokens += tokens.size
        self.tokens += tokens.size
        self.characters += sum(len(span.text) for span in spans)
        if self._num_pending_tokens >= _BATCH_TOKENS:
            self._flush()

    def close(self) -> None:
        """Flush pending tokens and finish the file. An empty chunk gets an empty batch."""
        if self._batches or self._writer is None:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        empty_columns = (np.empty(0, self._dtype), np.empty(0, np.int64), np.empty(0, np.uint8))
        columns = [np.concatenate(parts) for parts in zip(*(self._batches or [empty_columns]), strict=True)]
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
    """Picklable task that encodes a partition into a chunk. `tokenizer_path`: JSON form of the tokenizer."""

    directory: Path
    tokenizer_path: Path
    fields: TextFields
    dtype: str

    def __call__(self, partition: InputPartition) -> dict[str, Any]:
        """Write the chunk; return its report as JSON values."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallelism is over partitions
        tokenizer = _load_stored_tokenizer(self.tokenizer_path, self.tokenizer_path.stat().st_mtime_ns)
        return write_chunk(self.directory, partition, tokenizer, self.fields, self.dtype).to_json()


@dataclass(frozen=True)
class CollectCharactersTask:
    """Picklable task that collects the characters of a partition for the vocabulary of a char tokenizer."""

    fields: TextFields

    def __call__(self, partition: InputPartition) -> str:
        """Return the distinct characters of the partition, sorted."""
        readers = [DocumentReader(file_range, self.fields) for file_range in partition.ranges]
        return collect_characters(span.text for reader in readers for span in reader.read_spans())


@lru_cache(maxsize=1)
def _load_stored_tokenizer(path: Path, mtime_ns: int) -> Tokenizer:
    """Load a tokenizer once per process: loading a large vocabulary takes longer than encoding a partition."""
    return tokenizer_from_json(json.loads(path.read_text(encoding="utf-8")))
