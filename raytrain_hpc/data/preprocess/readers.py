"""Readers of text, JSONL and Parquet: the documents of a file range as text spans of bounded length."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_hpc.data.preprocess.input_files import JSONL, TEXT, InputFile, TextFields, check_unchanged
from raytrain_hpc.data.preprocess.partition import BLOCK_BYTES, FileRange, find_word_end, read_blocks
from raytrain_hpc.errors import DataError

SPAN_CHARS = 1 << 16  # limit; longer texts are split where no token changes (see partition.py)
_BATCH_ROWS = 64


@dataclass(frozen=True)
class TextSpan:
    """Text of one document. `ends_document`: it is the last span; `is_target`: its tokens count as targets."""

    text: str
    ends_document: bool
    is_target: bool = True


@dataclass
class DocumentReader:
    """Reader of the documents of a file range. `allow_invalid_utf8`: map invalid bytes to lone surrogates.

    `num_empty`: number of skipped documents without text, valid after all spans are read.
    """

    file_range: FileRange
    fields: TextFields
    allow_invalid_utf8: bool = False
    num_empty: int = 0

    def read_spans(self) -> Iterator[TextSpan]:
        """Yield the text spans in order. Raises DataError naming file and position of invalid input."""
        if self.file_range.file.format == TEXT:
            return self._read_text()
        return self._split_rows(
            self._read_json_rows() if self.file_range.file.format == JSONL else self._read_parquet_rows()
        )

    def _read_text(self) -> Iterator[TextSpan]:
        texts = self._decode(self._read_bytes())
        has_text = False
        for text, is_last in _split_text(texts):
            has_text = True
            yield TextSpan(text, is_last and self.file_range.is_last)
        if not has_text:
            self.num_empty += 1

    def _split_rows(self, rows: Iterable[list[str]]) -> Iterator[TextSpan]:
        for row in rows:
            if not row[-1]:  # empty text, or a pair without a response
                self.num_empty += 1
                continue
            for prompt, _ in _split_text(row[:-1]):
                yield TextSpan(prompt, ends_document=False, is_target=False)
            for text, is_last in _split_text(row[-1:]):
                yield TextSpan(text, is_last)

    def _read_bytes(self) -> Iterator[bytes]:
        """Yield the decompressed bytes of the range."""
        file = self.file_range.file
        if not file.compression:
            yield from read_blocks(self.file_range)
            return
        if not file.nbytes:
            return
        check_unchanged(file)
        try:
            with pa.OSFile(str(file.path)) as raw, pa.CompressedInputStream(raw, file.compression) as stream:
                while block := stream.read(BLOCK_BYTES):
                    yield block
        except (OSError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{file.path}: cannot be decompressed ({reason}); compress or copy it again") from error
        check_unchanged(file)

    def _decode(self, blocks: Iterator[bytes]) -> Iterator[str]:
        """Decode UTF-8 blocks; a character may span two blocks. Raises DataError for a binary file (NUL bytes)."""
        errors = "surrogateescape" if self.allow_invalid_utf8 else "strict"
        decoder = codecs.getincrementaldecoder("utf-8")(errors)
        num_consumed = self.file_range.begin
        for block in itertools.chain(blocks, [b""]):
            begin = num_consumed - len(decoder.getstate()[0])
            if (position := block.find(b"\0")) >= 0:
                raise DataError(
                    f"{self.file_range.file.path}: byte {num_consumed + position} is NUL, so it is a binary file or "
                    "text in UTF-16; leave it out (prepare 'FOLDER/**/*.txt') or convert it to UTF-8"
                )
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                text_kind = "of the decompressed text " if self.file_range.file.compression else ""
                raise DataError(
                    f"{self.file_range.file.path}: byte {begin + error.start} {text_kind}is not UTF-8 "
                    f"({error.reason}); convert the file, or use tokenizer byte"
                ) from error
            num_consumed += len(block)
            if text:
                yield text

    def _read_json_rows(self) -> Iterator[list[str]]:
        for number, line in enumerate(_split_lines(self._read_bytes())):
            if not number and not self.file_range.begin:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line or line.isspace():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise self._make_line_error(
                    number, f"is not UTF-8 ({error.reason} at byte {error.start} of it)"
                ) from error
            except (ValueError, RecursionError) as error:
                raise self._make_line_error(number, f"is not JSON ({error}); expected one object per line") from error
            if not isinstance(row, dict):
                raise self._make_line_error(number, f"is {_describe_type(row)} and not an object with fields")
            try:
                texts = [_get_text(row, name) for name in self.fields.names]
                if b"\\u" in line:
                    "".join(texts).encode("utf-8")
            except UnicodeEncodeError as error:
                raise self._make_line_error(
                    number, "has half of a surrogate pair (\\ud800 to \\udfff) in its text"
                ) from error
            except DataError as error:
                raise self._make_line_error(number, str(error)) from error
            yield texts

    def _make_line_error(self, number: int, problem: str) -> DataError:
        """Build an error with the line number in the file. Counts lines before the range, reading the file up to it."""
        num_lines_before = 0
        if self.file_range.begin:
            head = FileRange(self.file_range.file, 0, self.file_range.begin, is_last=False)
            num_lines_before = sum(block.count(b"\n") for block in read_blocks(head))
        return DataError(f"{self.file_range.file.path}: line {num_lines_before + number + 1} {problem}")

    def _read_parquet_rows(self) -> Iterator[list[str]]:
        file, (first, stop) = self.file_range.file, self.file_range.row_groups
        check_unchanged(file)
        try:
            with pq.ParquetFile(file.path, pre_buffer=False, buffer_size=BLOCK_BYTES) as parquet_file:
                _check_columns(file, parquet_file.schema_arrow, self.fields)
                row = sum(parquet_file.metadata.row_group(i).num_rows for i in range(first))
                names = list(self.fields.names)
                for batch in parquet_file.iter_batches(
                    _BATCH_ROWS, range(first, stop), columns=names, use_threads=False
                ):
                    yield from _read_batch_rows(file, batch, names, row)
                    row += batch.num_rows
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file.path}: not a readable Parquet file ({' '.join(str(error).split())})") from error
        check_unchanged(file)


def _read_batch_rows(file: InputFile, batch: pa.RecordBatch, names: list[str], row: int) -> Iterator[list[str]]:
    """Yield the texts of each row of a batch whose first row is `row`."""
    try:
        columns = [batch.column(name).to_pylist() for name in names]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.path}: a text in rows {row}..{row + batch.num_rows - 1} is not UTF-8 ({error.reason}); write the "
            "file again from text"
        ) from error
    for texts in zip(*columns, strict=True):
        yield [text or "" for text in texts]


def _check_columns(file: InputFile, schema: pa.Schema, fields: TextFields) -> None:
    for name in fields.names:
        if name not in schema.names:
            raise DataError(f"{file.path}: has no column {name!r}; it has {', '.join(schema.names)}")
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{file.path}: column {name!r} is {kind} and not text")


def _get_text(row: dict[str, Any], name: str) -> str:
    """Return the text of a field; null is empty text. Raises DataError if it is missing or not a string."""
    if name not in row:
        raise DataError(f"has no field {name!r}; it has {', '.join(map(repr, list(row)[:10])) or 'none'}")
    value = row[name]
    if value is not None and not isinstance(value, str):
        raise DataError(f"has {_describe_type(value)} in field {name!r}, and not text")
    return value or ""


def _describe_type(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object", str: "text"}
    return names.get(type(value), "null")


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Split blocks into lines without newlines. Each line is joined once, even if it spans many blocks."""
    fragments: list[bytes] = []
    for block in blocks:
        first, *following = block.split(b"\n")
        fragments.append(first)
        if following:
            yield b"".join(fragments)
            yield from following[:-1]
            fragments = [following[-1]]
    yield b"".join(fragments)


def _split_text(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Split the concatenation of `texts` into spans of at most SPAN_CHARS; yield (span, is_last)."""
    buffer = ""
    for text in texts:
        buffer, begin = buffer + text, 0
        while len(buffer) - begin > SPAN_CHARS:
            end = find_word_end(buffer, begin, begin + SPAN_CHARS)
            yield buffer[begin:end], False
            begin = end
        buffer = buffer[begin:]
    if buffer:
        yield buffer, True
