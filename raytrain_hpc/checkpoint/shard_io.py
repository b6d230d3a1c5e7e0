"""Tensors to and from the safetensors files of a checkpoint: one file a rank, each slice named by its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from raytrain_hpc.checkpoint.manifest import Checkpoint, ShardEntry, ShardLocation, ShardReport
from raytrain_hpc.checkpoint.safetensors_writer import TensorEntry, write_tensors
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError
from raytrain_hpc.state.shard_index import RegionCopy, TensorSlices, find_difference, find_missing, plan_copies
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, dtype_name


def write_shard(path: Path, shards: Iterable[StateShard]) -> ShardReport:
    """Write these slices as one safetensors file, synced, and say what was written.

    The directory must exist: it is made, and taken away, by the driver alone. Empty slices are left out. Raises OSError
    where the disk refuses, after removing the partial file, and ValueError where one box is given twice.
    """
    held = [one for one in shards if one.box.numel]
    entries = [TensorSlices(one.name, one.shape, one.dtype, (one.box,)) for one in held]
    return write_slices(path, entries, (one.tensor for one in held))


def write_slices(path: Path, slices: Sequence[TensorSlices], tensors: Iterable[Tensor]) -> ShardReport:
    """The same of slices of one box each, whose tensors may be made as they are asked for."""
    entries = tuple(
        ShardEntry(one.name, one.shape, one.dtype, box.offsets, box.sizes, f"{one.name}{box}")
        for one in slices
        for box in one.boxes
    )
    size, checksum = write_tensors(path, [TensorEntry(one.key, one.dtype, one.sizes) for one in entries], tensors)
    return ShardReport(path.name, size, checksum, entries)


def read_state(checkpoint: Checkpoint, destination: ShardedState) -> None:
    """Fill every slice of `destination` in place from a checkpoint that was written on any layout.

    Files are memory-mapped: only the rows needed are read. Tensors that only the checkpoint holds are left out; whether
    there should be any is for the caller to ask, with `state.index.compare`. Raises CheckpointError, before any tensor
    is changed, naming the first tensor that is missing, has another shape or dtype or is not covered; and
    CheckpointDamaged where a file does not hold what the manifest says.
    """
    wanted = destination.to_index()
    source = checkpoint.index.select(wanted)
    if difference := find_difference(source, wanted):
        raise CheckpointError(f"{checkpoint.path} does not fit this run: {difference} there")
    for name, region in find_missing([source], wanted):
        raise CheckpointError(f"{checkpoint.path} does not hold {name}{region}")
    by_file: dict[str, list[tuple[ShardLocation, RegionCopy]]] = {}
    for piece in plan_copies(source, wanted):
        part = checkpoint.locations[piece.name][piece.source_box]
        by_file.setdefault(part.file, []).append((part, piece))
    for file, pieces in by_file.items():
        _read_file(checkpoint.path / file, pieces, destination)


def _read_file(path: Path, pieces: Iterable[tuple[ShardLocation, RegionCopy]], destination: ShardedState) -> None:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for part, piece in pieces:
                # A view of the mapped file: slicing it touches the pages of the slice alone.
                stored = file.get_tensor(part.key)
                target = destination.get_shard(piece.name, piece.destination_box)
                if tuple(stored.shape) != part.box.sizes or dtype_name(stored.dtype) != target.dtype:
                    found = f"{dtype_name(stored.dtype)} {list(stored.shape)}"
                    raise CheckpointCorruptedError(f"{path}: {part.key} is {found}, not what the manifest says")
                target.tensor[piece.destination_slices].copy_(stored[piece.source_slices])
    except (SafetensorError, OSError) as error:
        raise CheckpointCorruptedError(f"{path}: cannot be read: {error}") from error
