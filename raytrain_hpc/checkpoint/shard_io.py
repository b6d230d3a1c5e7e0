"""Reading and writing the shard files of a checkpoint: one safetensors file per rank, each slice keyed by its box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from raytrain_hpc.checkpoint.manifest import Checkpoint, ShardEntry, ShardLocation, ShardReport
from raytrain_hpc.checkpoint.object_reader import read_object
from raytrain_hpc.checkpoint.safetensors_writer import TensorEntry, write_tensors
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError
from raytrain_hpc.state.shard_index import RegionCopy, TensorSlices, find_difference, find_missing, plan_copies
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, get_dtype_name
from raytrain_hpc.storage.location import Location
from raytrain_hpc.storage.object_path import ObjectPath


def write_shard(path: Location, shards: Iterable[StateShard]) -> ShardReport:
    """Write `shards` as one safetensors file, synced or uploaded, and return the report for the driver.

    Empty shards are skipped. A local directory must exist; only the driver removes it. Raises OSError if
    writing fails, after removing the partial file, and ValueError if a box occurs twice.
    """
    non_empty = [shard for shard in shards if shard.box.numel]
    slices = [TensorSlices(shard.name, shard.shape, shard.dtype, (shard.box,)) for shard in non_empty]
    return write_slices(path, slices, (shard.tensor for shard in non_empty))


def write_slices(path: Location, slices: Sequence[TensorSlices], tensors: Iterable[Tensor]) -> ShardReport:
    """Write slices of one box each, as `write_shard` does; `tensors` may be a generator that creates them on demand."""
    entries = tuple(
        ShardEntry(tensor.name, tensor.shape, tensor.dtype, box.offsets, box.sizes, f"{tensor.name}{box}")
        for tensor in slices
        for box in tensor.boxes
    )
    checksum = write_tensors(path, [TensorEntry(entry.key, entry.dtype, entry.sizes) for entry in entries], tensors)
    return ShardReport(path.name, checksum, entries)


def read_state(checkpoint: Checkpoint, destination: ShardedState) -> None:
    """Fill every shard of `destination` in place from a checkpoint that was written in any layout.

    Only the required rows are read: local files are memory-mapped, objects are read by ranges and verified by block.
    Tensors that only the checkpoint holds are ignored; to detect them, call `shard_index.find_difference`. Raises
    CheckpointError, before any tensor is changed, naming the first tensor that is missing, has another shape or dtype,
    or is not covered. Raises CheckpointCorruptedError if a file does not match the manifest.
    """
    destination_index = destination.to_index()
    source_index = checkpoint.index.select(destination_index)
    if difference := find_difference(source_index, destination_index):
        raise CheckpointError(f"{checkpoint.path} does not fit this run: {difference} in the checkpoint")
    for name, region in find_missing([source_index], destination_index):
        raise CheckpointError(f"{checkpoint.path} does not hold {name}{region}")
    by_file: dict[str, list[tuple[ShardLocation, RegionCopy]]] = {}
    for copy in plan_copies(source_index, destination_index):
        location = checkpoint.locations[copy.name][copy.source_box_number]
        by_file.setdefault(location.file, []).append((location, copy))
    for file, copies in by_file.items():
        path = checkpoint.files_path / file
        if isinstance(path, ObjectPath):
            read_object(path, checkpoint.files[file], copies, destination)
        else:
            _read_file(path, copies, destination)


def open_shards(checkpoint: Checkpoint, directory: Path, files: Sequence[str]) -> ShardedState:
    """Return the shards in some files of a checkpoint, which lie in `directory`, as views of the mapped files.

    Raises CheckpointCorruptedError if a file cannot be opened, or is not as the manifest lists it.
    """
    return ShardedState(shard for file in files for shard in _open_file(checkpoint, directory / file))


def _open_file(checkpoint: Checkpoint, path: Path) -> list[StateShard]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return [
                StateShard(name, tensor.shape, tensor.dtype, location.box, file.get_tensor(location.key))
                for name, tensor in checkpoint.index.items()
                for location in checkpoint.locations[name]
                if location.file == path.name
            ]
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointCorruptedError(f"{path}: cannot be read: {error}") from error


def _read_file(path: Path, copies: Iterable[tuple[ShardLocation, RegionCopy]], destination: ShardedState) -> None:
    """Copy the planned regions from one shard file. Raises CheckpointCorruptedError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for location, copy in copies:
                # A view of the mapped file: slicing it reads the pages of the slice only.
                stored = file.get_tensor(location.key)
                target = destination.get_shard(copy.name, copy.destination_box_number)
                if tuple(stored.shape) != location.box.sizes or get_dtype_name(stored.dtype) != target.dtype:
                    actual = f"{get_dtype_name(stored.dtype)} {list(stored.shape)}"
                    raise CheckpointCorruptedError(f"{path}: {location.key} is {actual}, not as listed in the manifest")
                target.tensor[copy.destination_slices].copy_(stored[copy.source_slices])
    except (SafetensorError, OSError) as error:
        raise CheckpointCorruptedError(f"{path}: cannot be read: {error}") from error
