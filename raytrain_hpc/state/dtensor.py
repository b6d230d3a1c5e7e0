"""The slice that a rank holds of a DTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raytrain_hpc.state.shard_index import Box


def get_dtensor_slice(tensor: torch.Tensor) -> tuple[tuple[int, ...], Box, torch.Tensor]:
    """(global shape, box held by this rank, local tensor) of a DTensor: `state.holding.slice_of` for that case.

    Raises ValueError, beside what `slice_of` raises, where the local tensor is not what the mesh says it is.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"{type(tensor).__name__} is no DTensor")
    shape = tuple(tensor.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"tensor of shape {list(shape)} is a partial sum: {placements}; reduce it first")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is outside the mesh of a tensor of shape {list(shape)}")
    _check_contiguous_rows(mesh.shape, placements)
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    local = tensor.to_local().detach()
    if tuple(local.shape) != tuple(sizes):
        raise ValueError(f"tensor of shape {list(shape)} has {list(local.shape)} here, and {list(sizes)} by its mesh")
    return shape, Box(tuple(offsets), tuple(sizes)), local


def _check_contiguous_rows(mesh_shape: Sequence[int], placements: Sequence[object]) -> None:
    """FSDP over TP on one dimension is a strided shard that the later plain shards make contiguous again."""
    for position, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", 1)
        later = [
            size
            for size, other in zip(mesh_shape[position + 1 :], placements[position + 1 :], strict=True)
            if isinstance(other, Shard) and other.dim == getattr(placement, "dim", None)
        ]
        if factor != 1 and factor != math.prod(later):
            raise ValueError(f"placements {tuple(placements)} leave a rank with rows that are not adjacent")
