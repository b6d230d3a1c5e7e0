"""The inputs in pieces that are worked on independently: a function of the inputs alone, never of who works on them.

A part is what is read of one file at a stretch: a range of bytes of uncompressed text or JSONL, row groups of a Parquet
file, or a whole compressed file. A piece is consecutive parts of about `PIECE_BYTES`, so that small files share one.

A text may be cut where a letter is followed by a space or newline, else by punctuation. There the splitting rules of
GPT-2, cl100k, o200k and Llama 3 begin a new word whatever stands around, so that its parts give the tokens of the
whole. Cutting *after* a newline would not do: "\\n\\n" is one token at the end of a text, and two before a letter.
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
MAX_PARTITIONS = 1 << 16  # of larger inputs pieces are larger, not more: their list stays small, and they are streamed
BLOCK_BYTES = 1 << 20
_SCAN_BYTES = 1 << 16
# Spaces are preferred for tokenizers that put one in front of every text.
_WORD_END_PATTERNS = (re.compile(r"[^\W\d_](?=[ \r\n])"), re.compile(r"[^\W\d_](?=[,.;:!?)、。，；：！？）])"))


@dataclass(frozen=True)
class FileRange:
    """Bytes [begin, end) of a file. `last`: whether the file ends here; `groups`: row groups [first, stop) of Parquet.

    The parts of a file are disjoint and cover it.
    """

    file: InputFile
    begin: int
    end: int
    is_last: bool
    row_groups: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.end - self.begin


@dataclass(frozen=True)
class InputPartition:
    """Consecutive parts, the unit of work."""

    index: int
    ranges: tuple[FileRange, ...]

    @property
    def nbytes(self) -> int:
        """Size in the files."""
        return sum(part.nbytes for part in self.ranges)


def plan_partitions(files: Sequence[InputFile]) -> list[InputPartition]:
    """The inputs, in order, as pieces. DataError for a file that cannot be read."""
    size = max(PARTITION_BYTES, -(-sum(file.nbytes for file in files) // MAX_PARTITIONS))
    pieces: list[InputPartition] = []
    gathered: list[FileRange] = []
    for part in (part for file in files for part in _split_file(file, size)):
        if gathered and sum(one.nbytes for one in gathered) + part.nbytes > size:
            pieces.append(InputPartition(len(pieces), tuple(gathered)))
            gathered = []
        gathered.append(part)
    return [*pieces, InputPartition(len(pieces), tuple(gathered))]


def compute_checksum(file_range: FileRange) -> str:
    """Hex sha256 of a part's bytes. DataError where they cannot be read any more."""
    digest = hashlib.sha256()
    for block in read_blocks(file_range):
        digest.update(block)
    return digest.hexdigest()


def combine_checksums(partitions: Iterable[tuple[InputPartition, Sequence[str]]]) -> list[tuple[InputFile, str]]:
    """Every file's checksum from those of its parts: a file of one part has that part's, which is its plain sha256,
    a file of several the sha256 over the hex digests of its parts in order.
    """
    digests: list[tuple[InputFile, list[str]]] = []
    for piece, checksums in partitions:
        for part, digest in zip(piece.ranges, checksums, strict=True):
            if part.begin == 0:  # the first part of its file
                digests.append((part.file, []))
            digests[-1][1].append(digest)
    return [(file, parts[0] if len(parts) == 1 else _hash_digests(parts)) for file, parts in digests]


def _hash_digests(digests: Sequence[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def read_blocks(file_range: FileRange) -> Iterator[bytes]:
    """The bytes of a part, as they lie in the file. DataError where the file cannot be read or has changed."""
    file = file_range.file
    try:
        check_unchanged(file)
        with file.path.open("rb") as stream:
            stream.seek(file_range.begin)
            left = file_range.nbytes
            while left and (block := stream.read(min(BLOCK_BYTES, left))):
                left -= len(block)
                yield block
        check_unchanged(file)
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror or error})") from error


def find_word_end(text: str, begin: int, stop: int) -> int:
    """The last position in (begin, stop] where `text` may be cut; `stop` itself where there is no better one."""
    for rule in _WORD_END_PATTERNS:
        for first in (max(begin, stop - 1024), begin):
            # The letter's follower must be seen: one position more than the cut may be at.
            last = deque(rule.finditer(text, first, stop + 1), maxlen=1)
            if last:
                return last[0].end()
    return stop


def _split_file(file: InputFile, size: int) -> Iterator[FileRange]:
    if file.format == PARQUET:
        yield from _split_row_groups(file, size)
        return
    try:
        cuts = list(_find_split_points(file, size))
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror or error})") from error
    edges = [0, *cuts, file.nbytes]
    for begin, end in zip(edges, edges[1:], strict=False):
        yield FileRange(file, begin, end, is_last=end == file.nbytes)


def _find_split_points(file: InputFile, size: int) -> Iterator[int]:
    """Ascending positions inside a file, about `size` apart."""
    if file.compression or file.nbytes <= size:
        return
    find = _find_line_start if file.format == JSONL else _find_word_end_in_file
    with file.path.open("rb") as stream:
        cut = find(stream, size, size)
        while 0 < cut < file.nbytes:
            yield cut
            cut = find(stream, cut + size, size)


def _find_line_start(stream: BinaryIO, target: int, size: int) -> int:
    """The next position after a newline, 0 where there is none."""
    stream.seek(target)
    while block := stream.read(_SCAN_BYTES):
        if (found := block.find(b"\n")) >= 0:
            return target + found + 1
        target += len(block)
    return 0


def _find_word_end_in_file(stream: BinaryIO, target: int, size: int) -> int:
    """The next position where a text may be cut, else the next character; 0 where the text ends before."""
    stop = target + size
    first = 0
    for begin in range(target, stop, _SCAN_BYTES):
        stream.seek(begin)
        # A few bytes more, for the character after the window. Half a character is no letter and no space.
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
    """Byte at which each row group of a Parquet file begins. DataError where it is no Parquet file."""
    try:
        with pq.ParquetFile(path) as opened:
            described = opened.metadata
            groups = [described.row_group(i) for i in range(described.num_row_groups)]
            return [_get_row_group_offset(group) for group in groups]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({' '.join(str(error).split())})") from error


def _get_row_group_offset(group: pq.RowGroupMetaData) -> int:
    columns = [group.column(i) for i in range(group.num_columns)]
    return min(int(c.dictionary_page_offset or c.data_page_offset) for c in columns)
