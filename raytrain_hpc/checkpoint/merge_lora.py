"""Weights of a checkpoint with their low-rank adapters added to them, where it has any."""

from __future__ import annotations

import torch

from raytrain_hpc.checkpoint.manifest import ADAPTERS, Checkpoint
from raytrain_hpc.checkpoint.shard_io import read_pieces
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, Held, Holding


def read_merged(checkpoint: Checkpoint, destination: Holding) -> None:
    """As `shard.read_pieces`; then every weight W that adapters A and B belong to is W + (alpha / rank) B A."""
    read_pieces(checkpoint, destination)
    said = checkpoint.meta.get(ADAPTERS) or {}
    for held in destination if said else ():
        layer = held.name.removesuffix(".weight")
        names = [f"{layer}.lora_{matrix}.default.weight" for matrix in "AB"]
        if names[0] not in checkpoint.index:
            continue
        a, b = (_whole(checkpoint, name) for name in names)
        rows, columns = held.box.slices_in(Box.whole(held.shape))
        held.tensor.add_(b[rows] @ a[:, columns], alpha=said["alpha"] / said["rank"])


def _whole(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    there = checkpoint.index[name]
    tensor = torch.empty(there.shape, dtype=TORCH_DTYPES[there.dtype])
    read_pieces(checkpoint, Holding([Held.of(name, tensor)]))
    return tensor
