"""Local dataset cache: copy a dataset to a disk of the node once, verify it, and reuse it in later runs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, Manifest, Shard
from raytrain_hpc.data.dataset.storage import Location, RemoteFile, read_local
from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import NO_RETRY, ReadRetry

_BLOCK_BYTES = 8 << 20


def copy_to_local_cache(
    source: Location,
    manifest: Manifest,
    cache_dir: Path,
    retry: ReadRetry = NO_RETRY,
    on_block: Callable[[], None] = lambda: None,
) -> Path:
    """Copy a dataset below `cache_dir` unless it is cached already; return its directory there.

    One process per node copies while the others wait. `retry`: repeats reads that fail. `on_block`: called before each
    block is copied, but not while another process copies. Raises DataError if a shard does not match its checksum in
    the manifest, or the directory cannot be written.
    """
    target = cache_dir / f"dataset-{manifest.dataset_hash[:16]}"
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _lock_file(target / ".lock"):
            for shard in shards:
                if not _is_cached(target / shard.file, shard):
                    _copy_shard(source, shard, target, retry, on_block)
            _write_atomically(target / MANIFEST_FILE, json.dumps(manifest.to_json()).encode())
    except OSError as error:
        size = sum(shard.bytes for shard in shards) / 2**30
        raise DataError(
            f"data.local_cache={cache_dir}: cannot be written ({error.strerror or error}); "
            f"free {size:.2f} GiB for the dataset, choose another directory, or leave data.local_cache empty"
        ) from error
    return target


def _is_cached(path: Path, shard: Shard) -> bool:
    """Return whether a shard is cached. Files get their final name only after verification, so the size suffices."""
    return path.is_file() and path.stat().st_size == shard.bytes


def _copy_shard(source: Location, shard: Shard, target: Path, retry: ReadRetry, on_block: Callable[[], None]) -> None:
    digest, reader = hashlib.sha256(), _BlockReader(source / shard.file, retry)
    partial_path = target / f"{shard.file}.partial"
    try:
        with partial_path.open("wb") as copy:
            on_block()
            while block := reader.read():
                digest.update(block)
                copy.write(block)
                on_block()
            copy.flush()
            os.fsync(copy.fileno())
        if digest.hexdigest() != shard.sha256:
            raise DataError(f"{source / shard.file}: shard does not match its sha256; prepare the dataset again")
        partial_path.replace(target / shard.file)
    finally:
        reader.close()
        partial_path.unlink(missing_ok=True)


def _write_atomically(path: Path, content: bytes) -> None:
    partial_path = path.with_name(f"{path.name}.partial")
    partial_path.write_bytes(content)
    partial_path.replace(path)


class _BlockReader:
    """Reader of a file of the source in blocks. Raises DataError if it, not the target, cannot be read."""

    def __init__(self, file: Path | RemoteFile, retry: ReadRetry):
        self._file, self._retry = file, retry
        self._handle: Any = None
        self._offset = 0

    def read(self) -> bytes:
        """Return the next block; empty at the end."""
        if isinstance(self._file, RemoteFile):
            block = self._file.call(self._read_next, self._retry)
        else:
            block = read_local(self._read_next, self._file, self._retry)
        self._offset += len(block)
        return block

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            self._handle.close()

    def _read_next(self) -> bytes:
        try:
            if self._handle is None:
                self._handle = self._file.open() if isinstance(self._file, RemoteFile) else self._file.open("rb")
                self._handle.seek(self._offset)
            return bytes(self._handle.read(_BLOCK_BYTES))
        except OSError:
            self._handle = None  # one that is stale stays so
            raise


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
