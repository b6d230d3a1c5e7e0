"""Text files to a dataset directory, in two passes of bounded memory: survey (checksums, vocabulary), then encode.

All inputs are one stream of text, file after file with nothing in between, newlines untouched. Its first part is the
training split, the rest the validation split. The directory appears complete or not at all.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raytrain_hpc.data.manifest import MANIFEST, Input, Manifest, Split, load_manifest, verify
from raytrain_hpc.data.shards import ShardWriter, token_dtype
from raytrain_hpc.data.tokenizer import KINDS, ByteTokenizer, Tokenizer, build_tokenizer, unknown_tokenizer
from raytrain_hpc.errors import DataError

BLOCK_BYTES = 4 << 20
Progress = Callable[[int, int], None]


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True)
class _File:
    """An input file as it was found; a change under our feet is noticed by size and time."""

    path: Path
    name: str
    bytes: int
    mtime_ns: int


def prepare(
    inputs: Sequence[Path | str],
    out: Path | str,
    *,
    tokenizer: str = "byte",
    val_fraction: float = 0.1,
    shard_tokens: int = 1 << 26,
    progress: Progress | None = None,
) -> Manifest:
    """Write a dataset at `out` from text files and folders (all files below one, sorted by relative path).

    `val_fraction` of the tokens, at the end of the stream, become the validation split. `progress(done, total)` counts
    bytes over both passes. A dataset already at `out` is kept if the same inputs and settings made it; anything else
    there is an error: nothing is ever overwritten. DataError for inputs, settings or a target that cannot be used.
    """
    _check_settings(tokenizer, val_fraction, shard_tokens)
    out = Path(out)
    _check_target(out)
    files = find_files(inputs)
    tick = _Meter(2 * sum(file.bytes for file in files), progress)
    built, found, characters = _survey(files, tokenizer, tick)
    total = sum(file.bytes for file in files) if characters is None else characters
    sizes = split_sizes(total, val_fraction)
    settings = {"tokenizer": tokenizer, "val_fraction": val_fraction, "shard_tokens": shard_tokens}
    present = _prepared_before(out, built, found, settings)
    if present is not None:
        return present
    dtype = token_dtype(built.vocab_size)
    try:
        with _new_directory(out) as partial:
            splits = _write_splits(partial, _encode(files, built, tick), sizes, dtype, shard_tokens)
            manifest = Manifest(built.to_json(), built.vocab_size, dtype, False, characters, settings, found, splits)
            _write_synced(partial / MANIFEST, json.dumps(manifest.to_json(), indent=1) + "\n")
    except OSError as error:
        # Another process may have put the same dataset there in the meantime: then it is as good as ours.
        present = _prepared_before(out, built, found, settings)
        if present is not None:
            return present
        raise DataError(f"{out}: cannot be written ({error.strerror or error})") from error
    return manifest


def split_sizes(total: int, val_fraction: float) -> dict[str, int]:
    """Tokens of each split: train gets int(total * (1 - val_fraction)), computed on the decimal as written.

    DataError where a split would have fewer than the two tokens (one input, one target) that a loss needs.
    """
    train = int(total * (1 - Fraction(str(val_fraction))))
    sizes = {"train": train, "val": total - train} if val_fraction else {"train": total}
    for name, size in sizes.items():
        if size < 2:
            raise DataError(
                f"val_fraction={val_fraction}: of {total} tokens {size} would be left for {name}, which needs 2; "
                "give more text or another fraction"
            )
    return sizes


def find_files(inputs: Iterable[Path | str]) -> list[_File]:
    """The files that `inputs` name, in the order given, those of a folder sorted by relative path.

    DataError for a missing or empty file, a folder without files, or nothing at all. Empty files inside a folder are
    ordinary and kept.
    """
    files: list[_File] = []
    for item in map(Path, inputs):
        if item.is_dir():
            below = sorted((p.relative_to(item).as_posix(), p) for p in item.rglob("*") if p.is_file())
            if not below:
                raise DataError(f"{item}: the folder has no files")
            files += [_found(path, name) for name, path in below]
        elif not item.exists():
            raise DataError(f"{item}: no such file or folder")
        else:
            files.append(_found(item, item.name))
            if not files[-1].bytes:
                raise DataError(f"{item}: the file is empty")
    if not sum(file.bytes for file in files):
        raise DataError("nothing to prepare: the inputs hold no text")
    return files


def _found(path: Path, name: str) -> _File:
    stat = path.stat()
    return _File(path, name, stat.st_size, stat.st_mtime_ns)


def _check_settings(tokenizer: str, val_fraction: float, shard_tokens: int) -> None:
    if tokenizer not in KINDS:
        raise unknown_tokenizer(tokenizer)
    if not 0 <= val_fraction < 1:
        raise DataError(f"val_fraction={val_fraction}: must be at least 0 and below 1")
    if shard_tokens < 1:
        raise DataError(f"shard_tokens={shard_tokens}: must be at least 1")


def _check_target(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; choose another directory to write to")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).exists():
        raise DataError(f"{out}: holds other files and is no dataset; choose another directory to write to")


def _prepared_before(
    out: Path, tokenizer: Tokenizer, inputs: tuple[Input, ...], settings: dict[str, Any]
) -> Manifest | None:
    """The manifest of the dataset at `out` if it is the one asked for; None if nothing is there; else DataError."""
    if not (out / MANIFEST).exists():
        return None
    manifest = load_manifest(out)
    if (manifest.tokenizer, manifest.inputs, manifest.settings) != (tokenizer.to_json(), inputs, settings):
        raise DataError(f"{out}: holds a dataset of other inputs or settings; delete it or choose another directory")
    verify(out, manifest, limit_bytes=0)
    return manifest


def _survey(files: list[_File], spec: str, tick: _Meter) -> tuple[Tokenizer, tuple[Input, ...], int | None]:
    """First pass: the tokenizer, the checksum of every input, and the number of characters (None for bytes)."""
    found: list[Input] = []
    characters = 0

    def texts() -> Iterator[str]:
        nonlocal characters
        for file in files:
            digest = hashlib.sha256()
            raw = _read(file, tick, digest)
            if spec == ByteTokenizer.name:
                deque(raw, maxlen=0)
            else:
                for text in _decode(file, raw):
                    characters += len(text)
                    yield text
            found.append(Input(file.name, file.bytes, digest.hexdigest()))

    unread = texts()
    tokenizer = build_tokenizer(spec, unread)
    deque(unread, maxlen=0)  # a tokenizer that needs no vocabulary leaves the texts unread, and so the inputs unhashed
    return tokenizer, tuple(found), None if spec == ByteTokenizer.name else characters


def _encode(files: list[_File], tokenizer: Tokenizer, tick: _Meter) -> Iterator[npt.NDArray[Any]]:
    """Second pass: the tokens, block by block."""
    for file in files:
        raw = _read(file, tick)
        if isinstance(tokenizer, ByteTokenizer):  # any bytes are tokens, valid UTF-8 or not
            yield from (np.frombuffer(block, dtype=np.uint8) for block in raw)
        else:
            yield from (tokenizer.encode(text) for text in _decode(file, raw))


def _read(file: _File, tick: _Meter, digest: _Digest | None = None) -> Iterator[bytes]:
    """The bytes of a file in blocks. DataError where it cannot be read or is not the file found at the start."""
    try:
        if _found(file.path, file.name) != file:
            raise DataError(f"{file.path}: changed while it was prepared; prepare again")
        with file.path.open("rb") as stream:
            seen = 0
            while block := stream.read(BLOCK_BYTES):
                seen += len(block)
                if digest is not None:
                    digest.update(block)
                yield block
                tick(len(block))
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror or error})") from error
    if seen != file.bytes:
        raise DataError(f"{file.path}: changed while it was prepared; prepare again")


def _decode(file: _File, blocks: Iterator[bytes]) -> Iterator[str]:
    """UTF-8 to text; a character may lie across two blocks. DataError naming the first byte that is no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    consumed = 0
    for block in itertools.chain(blocks, [b""]):
        begin = consumed - len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file.path}: byte {begin + error.start} is not UTF-8 ({error.reason}); convert the file, or use "
                "tokenizer byte"
            ) from error
        consumed += len(block)
        if text:
            yield text


def _write_splits(
    directory: Path, blocks: Iterator[npt.NDArray[Any]], sizes: dict[str, int], dtype: str, shard_tokens: int
) -> dict[str, Split]:
    """Deal the stream of tokens out to the splits, one after the other."""
    writers = {name: ShardWriter(directory, name, dtype, shard_tokens) for name in sizes}
    left = dict(sizes)
    for block in blocks:
        for name, writer in writers.items():
            writer.append(block[: left[name]])
            taken = min(left[name], block.size)
            left[name] -= taken
            block = block[taken:]
    return {name: writer.close() for name, writer in writers.items()}


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its place when the block ends well, and vanishes otherwise."""
    out = Path(os.path.abspath(out))  # "." has no name and no parent of its own
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    partial.mkdir()
    try:
        yield partial
        _sync_directory(partial)
        partial.rename(out)  # fails where a directory that is not empty has come up in the meantime
        _sync_directory(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Meter:
    """Adds up bytes and passes them on to a progress callback."""

    def __init__(self, total: int, progress: Progress | None):
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self, amount: int) -> None:
        self._done += amount
        if self._progress is not None:
            self._progress(self._done, self._total)
