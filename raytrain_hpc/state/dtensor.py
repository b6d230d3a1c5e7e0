"""The slice of a DTensor that this rank stores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Shard

from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.torch_private import compute_local_box, get_split_factor


def get_dtensor_slice(tensor: torch.Tensor) -> tuple[tuple[int, ...], Box, torch.Tensor]:
    """Return (shape of the whole DTensor, box of it on this rank, local tensor).

    Under tensor or expert parallelism the DTensor is itself a shard of the global tensor. Called by
    `sharded_state.get_local_slice`. The local tensor is detached and shares memory. Raises TypeError if `tensor` is not
    a DTensor. Raises ValueError for a partial sum, for a rank outside the mesh, for rows that are not adjacent, and if
    the local tensor does not have the shape that the mesh implies.
    """
    if not isinstance(tensor, DTensor):
        raise TypeError(f"expected a DTensor, got {type(tensor).__name__}")
    shape = tuple(tensor.shape)
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"tensor of shape {list(shape)} is a partial sum: {placements}; reduce it first")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is outside the mesh of a tensor of shape {list(shape)}")
    _check_contiguous_rows(mesh.shape, placements)
    sizes, offsets = compute_local_box(shape, mesh, placements)
    local = tensor.to_local().detach()
    if tuple(local.shape) != sizes:
        raise ValueError(
            f"tensor of shape {list(shape)}: the local tensor has shape {list(local.shape)}, the mesh implies "
            f"{list(sizes)}"
        )
    return shape, Box(offsets, sizes), local


def _check_contiguous_rows(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> None:
    """Raise ValueError if a rank's rows are not contiguous in the global tensor.

    FSDP over DTensor-based tensor parallelism on one dimension gives a strided shard (the package's own tensor
    parallelism does not). Its rows are contiguous if the later plain shards of that dimension multiply to its split
    factor.
    """
    for position, placement in enumerate(placements):
        factor = get_split_factor(placement)
        later_sizes = [
            size
            for size, later in zip(mesh_shape[position + 1 :], placements[position + 1 :], strict=True)
            if isinstance(later, Shard) and later.dim == getattr(placement, "dim", None)
        ]
        if factor != 1 and factor != math.prod(later_sizes):
            raise ValueError(f"placements {tuple(placements)} leave a rank with rows that are not adjacent")
