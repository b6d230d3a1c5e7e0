"""Local dataset cache: copy a dataset to a disk of the node once, verify it, and reuse it in later runs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, Manifest, Shard
from raytrain_hpc.data.dataset.storage import Location, RemoteFile
from raytrain_hpc.errors import DataError

_BLOCK_BYTES = 8 << 20


def copy_to_local_cache(source: Location, manifest: Manifest, cache_dir: Path) -> Path:
    """Copy a dataset below `cache_dir` unless it is cached already; return its directory there.

    One process per node copies while the others wait. Raises DataError if a shard does not match its checksum in the
    manifest, or the directory cannot be written.
    """
    target = cache_dir / f"dataset-{manifest.dataset_hash[:16]}"
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _lock_file(target / ".lock"):
            for shard in shards:
                if not _is_cached(target / shard.file, shard):
                    _copy_shard(source, shard, target)
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


def _copy_shard(source: Location, shard: Shard, target: Path) -> None:
    digest = hashlib.sha256()
    partial_path = target / f"{shard.file}.partial"
    try:
        with partial_path.open("wb") as copy:
            for block in _read_blocks(source / shard.file):
                digest.update(block)
                copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
        if digest.hexdigest() != shard.sha256:
            raise DataError(f"{source / shard.file}: shard does not match its sha256; prepare the dataset again")
        partial_path.replace(target / shard.file)
    finally:
        partial_path.unlink(missing_ok=True)


def _write_atomically(path: Path, content: bytes) -> None:
    partial_path = path.with_name(f"{path.name}.partial")
    partial_path.write_bytes(content)
    partial_path.replace(path)


def _read_blocks(file: Path | RemoteFile) -> Iterator[bytes]:
    """Yield the content of a file in blocks. Raises DataError if the source, not the target, cannot be read."""
    if isinstance(file, RemoteFile):
        with file.open() as stream:
            while block := _read_block(file, stream):
                yield block
        return
    try:
        with file.open("rb") as local_file:
            yield from iter(partial(local_file.read, _BLOCK_BYTES), b"")
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _read_block(file: RemoteFile, stream: Any) -> bytes:
    with file.translate_errors():
        return bytes(stream.read(_BLOCK_BYTES))


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
