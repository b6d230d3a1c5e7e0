"""Verification of a checkpoint: every file has the length and the checksum that the manifest names."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from raytrain_hpc.checkpoint.checksum import ChecksumBuilder, FileChecksum
from raytrain_hpc.checkpoint.manifest import MANIFEST_FILE, Checkpoint, ShardReport, build_index, read_manifest
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError
from raytrain_hpc.state.shard_index import Box, StateIndex, TensorSlices, find_missing
from raytrain_hpc.storage.location import Location, get_size, read_chunks
from raytrain_hpc.storage.object_path import ObjectPath

_THREADS = 4
_CHUNK_BYTES = 2**18  # small: several files are read at once
_OBJECT_CHUNK_BYTES = 16 * 2**20  # of a request


def get_step_name(step: int) -> str:
    """Return the name of the directory of the checkpoint of `step`."""
    return f"step-{step:08d}"


def verify_checkpoint(path: Location) -> Checkpoint:
    """Read every byte of a checkpoint and compare it with the manifest. Return the checkpoint.

    Raises CheckpointCorruptedError naming the file and the problem, and CheckpointError if an object store does not
    answer, in which case nothing is known.
    """
    checkpoint = _read_manifest_of_step(path)
    with ThreadPoolExecutor(_THREADS) as pool:
        files = (checkpoint.files_path / name for name in checkpoint.files)
        for problem in pool.map(find_file_problem, files, checkpoint.files.values()):
            if problem:
                raise CheckpointCorruptedError(problem)
    return checkpoint


def check_checkpoint(path: Location) -> Checkpoint:
    """Check a checkpoint as far as loading it does not: `shard_io.read_state` verifies the blocks that it reads.

    In an object store, the length of each file is compared with the manifest. In a directory, where files are mapped
    and not verified when they are loaded, this is `verify_checkpoint`. Returns and raises as that does.
    """
    checkpoint = _read_manifest_of_step(path)
    if not isinstance(checkpoint.files_path, ObjectPath) or not all(
        checksum.block_digests for checksum in checkpoint.files.values()
    ):
        return verify_checkpoint(path)
    try:
        sizes = {info.path.name: info.bytes for info in checkpoint.files_path.list_directory()[1]}
    except OSError as error:
        raise CheckpointError(f"{checkpoint.files_path}: cannot be listed: {error.strerror}") from error
    for name, expected in checkpoint.files.items():
        if sizes.get(name) != expected.bytes:
            file = checkpoint.files_path / name
            raise CheckpointCorruptedError(
                f"{file}: {sizes[name]} bytes, expected {expected.bytes}" if name in sizes else f"{file}: missing"
            )
    return checkpoint


def _read_manifest_of_step(path: Location) -> Checkpoint:
    checkpoint = read_manifest(path)
    if path.name != get_step_name(checkpoint.step):
        raise CheckpointCorruptedError(f"{path}: {MANIFEST_FILE} is that of step {checkpoint.step}")
    return checkpoint


def read_if_complete(path: Location) -> Checkpoint | None:
    """Return the checkpoint if its manifest is readable and every file has its size. Cheap: reads no shard file."""
    try:
        checkpoint = read_manifest(path)
    except CheckpointCorruptedError:
        return None
    for name, expected in checkpoint.files.items():
        if find_size_problem(checkpoint.files_path / name, expected.bytes):
            return None
    return checkpoint


def find_gap(reports: Sequence[ShardReport]) -> str | None:
    """Return the first region of a tensor that no file holds, as text; None if all tensors are complete.

    Raises CheckpointError if two files disagree on a tensor's shape or dtype.
    """
    index = build_index(reports)
    complete = StateIndex(TensorSlices(t.name, t.shape, t.dtype, (Box.from_shape(t.shape),)) for t in index.values())
    for name, region in find_missing([index], complete):
        return f"{name}{region}"
    return None


def find_size_problem(path: Location, expected: int) -> str | None:
    """Describe why a file does not have the expected size in bytes; None if it does.

    Raises CheckpointError if an object store does not answer.
    """
    try:
        size = get_size(path)
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return describe_read_error(path, error)
    return None if size == expected else f"{path}: {size} bytes, expected {expected}"


def describe_read_error(path: Location, error: OSError) -> str:
    """Return an error of a local file as a problem of the file. Raises CheckpointError for one of an object store.

    A local file that cannot be read is as good as damaged. An object store that does not answer, or that refuses
    credentials, says nothing about the object.
    """
    if isinstance(path, ObjectPath):
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return f"{path}: cannot be read: {error.strerror}"


def find_file_problem(path: Location, expected: FileChecksum) -> str | None:
    """Describe how a file differs from the manifest in size or checksum; None if it matches. Reads the whole file."""
    if problem := find_size_problem(path, expected.bytes):
        return problem
    checksum = ChecksumBuilder(expected.algorithm)
    try:
        for chunk in read_chunks(
            path, expected.bytes, _OBJECT_CHUNK_BYTES if isinstance(path, ObjectPath) else _CHUNK_BYTES
        ):
            checksum.update(chunk)
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return describe_read_error(path, error)
    digest = checksum.finish().digest
    if digest != expected.digest:
        return f"{path}: checksum is {digest[:12]}..., the manifest says {expected.digest[:12]}..."
    return None
