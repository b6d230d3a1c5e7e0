"""Weights of a checkpoint with their low-rank adapters added to them, where it has any."""

from __future__ import annotations

import torch

from raytrain_hpc.checkpoint.manifest import LORA_META_KEY, Checkpoint
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, ShardedState, StateShard


def read_merged_state(checkpoint: Checkpoint, destination: ShardedState) -> None:
    """As `shard.read_pieces`; then every weight W that adapters A and B belong to is W + (alpha / rank) B A."""
    read_state(checkpoint, destination)
    said = checkpoint.meta.get(LORA_META_KEY) or {}
    for held in destination if said else ():
        layer = held.name.removesuffix(".weight")
        names = [f"{layer}.lora_{matrix}.default.weight" for matrix in "AB"]
        if names[0] not in checkpoint.index:
            continue
        a, b = (_read_tensor(checkpoint, name) for name in names)
        rows, columns = held.box.to_slices(Box.from_shape(held.shape))
        held.tensor.add_(b[rows] @ a[:, columns], alpha=said["alpha"] / said["rank"])


def _read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    there = checkpoint.index[name]
    tensor = torch.empty(there.shape, dtype=TORCH_DTYPES[there.dtype])
    read_state(checkpoint, ShardedState([StateShard.from_tensor(name, tensor)]))
    return tensor
