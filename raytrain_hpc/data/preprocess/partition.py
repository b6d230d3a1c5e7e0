"""Input partitions: units of work that are encoded independently. A function of the inputs alone, not of workers.

A file range is a range of bytes of uncompressed text or JSONL, row groups of a Parquet file, or a whole compressed
file. A partition is a list of consecutive ranges of about `PARTITION_BYTES`, so that small files share one.

Text is split where a letter is followed by a space or newline, else by punctuation. The pre-tokenizers of GPT-2,
cl100k, o200k and Llama 3 begin a new word there in any context, so that the spans give the same tokens as the whole
text. Splitting *after* a newline would not: "\\n\\n" is one token at the end of a text, and two before a letter.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_hpc.data.preprocess.input_files import JSONL, PARQUET, InputFile, check_unchanged
from raytrain_hpc.errors import DataError

PARTITION_BYTES = 4 << 20
MAX_PARTITIONS = 1 << 16  # larger inputs get larger partitions, which are streamed, and not a longer list
BLOCK_BYTES = 1 << 20
_SCAN_BYTES = 1 << 16
# Spaces are preferred, for tokenizers that prepend one to every text.
_WORD_END_PATTERNS = (re.compile(r"[^\W\d_](?=[ \r\n])"), re.compile(r"[^\W\d_](?=[,.;:!?)、。，；：！？）])"))


@dataclass(frozen=True)
class FileRange:
    """Bytes [begin, end) of a file. `is_last`: the file ends here; `row_groups`: Parquet row groups [first, stop).

    The ranges of a file are disjoint and cover it.
    """

    file: InputFile
    begin: int
    end: int
    is_last: bool
    row_groups: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        """Size in the file in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class InputPartition:
    """Unit of work: consecutive file ranges."""

    index: int
    ranges: tuple[FileRange, ...]

    @property
    def nbytes(self) -> int:
        """Total size of the ranges in bytes."""
        return sum(file_range.nbytes for file_range in self.ranges)


def plan_partitions(files: Sequence[InputFile]) -> list[InputPartition]:
    """Divide the inputs, in order, into partitions. Raises DataError for an unreadable file."""
    size = max(PARTITION_BYTES, -(-sum(file.nbytes for file in files) // MAX_PARTITIONS))
    partitions: list[InputPartition] = []
    ranges: list[FileRange] = []
    num_bytes = 0  # of `ranges`
    for file_range in (file_range for file in files for file_range in _split_file(file, size)):
        if ranges and num_bytes + file_range.nbytes > size:
            partitions.append(InputPartition(len(partitions), tuple(ranges)))
            ranges, num_bytes = [], 0
        ranges.append(file_range)
        num_bytes += file_range.nbytes
    return [*partitions, InputPartition(len(partitions), tuple(ranges))]


def compute_checksum(file_range: FileRange) -> str:
    """Compute the hex sha256 of the bytes of a range. Raises DataError if they cannot be read."""
    digest = hashlib.sha256()
    for block in read_blocks(file_range):
        digest.update(block)
    return digest.hexdigest()


def combine_checksums(partitions: Iterable[tuple[InputPartition, Sequence[str]]]) -> list[tuple[InputFile, str]]:
    """Combine the checksums of file ranges into one per file.

    A file of one range has the checksum of that range, its plain sha256. A file of several ranges has the sha256 over
    the hex digests of its ranges in order.
    """
    digests: list[tuple[InputFile, list[str]]] = []
    for partition, checksums in partitions:
        for file_range, digest in zip(partition.ranges, checksums, strict=True):
            if file_range.begin == 0:  # first range of its file
                digests.append((file_range.file, []))
            digests[-1][1].append(digest)
    return [
        (file, range_digests[0] if len(range_digests) == 1 else _hash_digests(range_digests))
        for file, range_digests in digests
    ]


def _hash_digests(digests: Sequence[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def read_blocks(file_range: FileRange) -> Iterator[bytes]:
    """Yield the raw bytes of a range in blocks. Raises DataError if the file is unreadable or has changed."""
    file = file_range.file
    try:
        check_unchanged(file)
        with file.path.open("rb") as stream:
            stream.seek(file_range.begin)
            remaining = file_range.nbytes
            while remaining and (block := stream.read(min(BLOCK_BYTES, remaining))):
                remaining -= len(block)
                yield block
        check_unchanged(file)
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror or error})") from error


def find_word_end(text: str, begin: int, stop: int) -> int:
    """Find the last position in (begin, stop] at which `text` may be split; return `stop` if there is none."""
    for rule in _WORD_END_PATTERNS:
        for first in (max(begin, stop - 1024), begin):
            # Search one character further: the pattern looks at the character after the split.
            last_match = deque(rule.finditer(text, first, stop + 1), maxlen=1)
            if last_match:
                return last_match[0].end()
    return stop


def _split_file(file: InputFile, size: int) -> Iterator[FileRange]:
    if file.format == PARQUET:
        yield from _split_row_groups(file, size)
        return
    try:
        split_points = list(_find_split_points(file, size))
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror or error})") from error
    edges = [0, *split_points, file.nbytes]
    for begin, end in zip(edges, edges[1:], strict=False):
        yield FileRange(file, begin, end, is_last=end == file.nbytes)


def _find_split_points(file: InputFile, size: int) -> Iterator[int]:
    """Yield ascending split positions of a file, about `size` apart."""
    if file.compression or file.nbytes <= size:
        return
    find_split = _find_line_start if file.format == JSONL else _find_word_end_in_file
    with file.path.open("rb") as stream:
        position = find_split(stream, size, size)
        while 0 < position < file.nbytes:
            yield position
            position = find_split(stream, position + size, size)


def _find_line_start(stream: BinaryIO, target: int, size: int) -> int:
    """Find the next position after a newline; return 0 if there is none."""
    stream.seek(target)
    while block := stream.read(_SCAN_BYTES):
        if (index := block.find(b"\n")) >= 0:
            return target + index + 1
        target += len(block)
    return 0


def _find_word_end_in_file(stream: BinaryIO, target: int, size: int) -> int:
    """Find the next position at which a text may be split, else the next character; return 0 at the end."""
    stop = target + size
    first = 0
    for begin in range(target, stop, _SCAN_BYTES):
        stream.seek(begin)
        # Read a few bytes more for the character after the window. A partial character matches no pattern.
        window = stream.read(_SCAN_BYTES + 8)
        if not window:
            return first
        lead = next((i for i, byte in enumerate(window[:4]) if byte & 0xC0 != 0x80), 0)
        first = first or begin + lead
        text = window[lead:].decode("utf-8", errors="surrogateescape")
        match = _WORD_END_PATTERNS[0].search(text) or _WORD_END_PATTERNS[1].search(text)
        if match is not None:
            return begin + lead + len(text[: match.end()].encode("utf-8", errors="surrogateescape"))
    return first


def _split_row_groups(file: InputFile, size: int) -> Iterator[FileRange]:
    starts = [*read_row_group_offsets(file.path), file.nbytes]
    first = 0
    for group in range(1, len(starts)):
        if group == len(starts) - 1 or starts[group + 1] - starts[first] > size:
            begin = 0 if first == 0 else starts[first]
            yield FileRange(file, begin, starts[group], is_last=group == len(starts) - 1, row_groups=(first, group))
            first = group
    if len(starts) == 1:  # no rows
        yield FileRange(file, 0, file.nbytes, is_last=True)


def read_row_group_offsets(path: Path) -> list[int]:
    """Read the byte offset of each row group of a Parquet file. Raises DataError if it is not a Parquet file."""
    try:
        with pq.ParquetFile(path) as parquet_file:
            metadata = parquet_file.metadata
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            return [_get_row_group_offset(group) for group in groups]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())})") from error


def _get_row_group_offset(group: pq.RowGroupMetaData) -> int:
    columns = [group.column(i) for i in range(group.num_columns)]
    return min(int(c.dictionary_page_offset or c.data_page_offset) for c in columns)
