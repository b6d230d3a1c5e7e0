"""Reading a checkpoint with its LoRA adapters merged into the weights, if it has any."""

from __future__ import annotations

import torch

from raytrain_hpc.checkpoint.manifest import LORA_META_KEY, Checkpoint
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, ShardedState, StateShard


def read_merged_state(checkpoint: Checkpoint, destination: ShardedState) -> None:
    """Fill `destination` in place as `shard_io.read_state` does, with LoRA adapters merged into the weights.

    A weight W with adapters A and B becomes W + (alpha / rank) B A.
    """
    read_state(checkpoint, destination)
    lora = checkpoint.meta.get(LORA_META_KEY) or {}
    for shard in destination if lora else ():
        layer = shard.name.removesuffix(".weight")
        names = [f"{layer}.lora_{matrix}.default.weight" for matrix in "AB"]
        if names[0] not in checkpoint.index:
            continue
        a, b = (_read_tensor(checkpoint, name) for name in names)
        rows, columns = shard.box.to_slices(Box.from_shape(shard.shape))
        shard.tensor.add_(b[rows] @ a[:, columns], alpha=lora["alpha"] / lora["rank"])


def _read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read one tensor of the checkpoint, unsharded."""
    slices = checkpoint.index[name]
    tensor = torch.empty(slices.shape, dtype=TORCH_DTYPES[slices.dtype])
    read_state(checkpoint, ShardedState([StateShard.from_tensor(name, tensor)]))
    return tensor
