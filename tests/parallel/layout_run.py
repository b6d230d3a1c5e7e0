"""Run a short training on a layout; return all metrics and the full state after the first and last step."""

from __future__ import annotations

from pathlib import Path

import torch

from raytrain_hpc.checkpoint.manifest import read_manifest
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

GPT2 = ["model.norm=layernorm", "model.activation=gelu", "model.position_embedding=learned", "model.bias=true"]
LLAMA = ["model.norm=rmsnorm", "model.activation=swiglu", "model.position_embedding=rotary", "model.bias=false"]
# Sizes that 2 and 4 do not divide: vocabulary 65, 50 channels, 15 positions.
ODD = ["model.vocab_size=65", "model.ffn_size=50", "train.seq_len=15"]
MODELS = {
    "gpt2": [*GPT2, *ODD, "model.tie_embeddings=true"],
    "gpt2, six heads": [*GPT2, *ODD, "model.hidden_size=48", "model.num_heads=6", "model.tie_embeddings=false"],
    "llama": [*LLAMA, *ODD, "model.num_kv_heads=2", "model.tie_embeddings=false"],
    "llama, two groups of three": [*LLAMA, "model.hidden_size=48", "model.num_heads=6", "model.num_kv_heads=2"],
    "qwen3": [*LLAMA, *ODD, "model.num_kv_heads=2", "model.head_dim=12", "model.qk_norm=true", "model.rope_factor=2"],
    "moe": [*LLAMA, *ODD, "model.num_kv_heads=2", "model.num_experts=5", "model.shared_expert_size=23"],
    "moe, bias": [*GPT2, *ODD, "model.num_experts=5", "model.experts_per_token=1", "model.load_balancing=bias"],
    "llama, three tokens": [*LLAMA, "model.num_kv_heads=1", "model.vocab_size=3", "model.tie_embeddings=false"],
    "llama, 50257 tokens": [
        *LLAMA,
        "model.vocab_size=50257",
        "model.hidden_size=16",
        "model.num_layers=1",
        "train.seq_len=7",
        "train.global_batch_size=3",
    ],
    "llama, five tokens": [*LLAMA, "model.num_kv_heads=1", "model.vocab_size=5", "model.tie_embeddings=true"],
}
STEPS = 2  # gradients are compared after the first step, the rest after the second; docs/parity.md uses 20
BASE = [
    "train.dtype=fp64",
    "model.dropout=0.1",
    "train.micro_batch_size=3",
    f"train.steps={STEPS}",
    "optimizer.lr=3e-3",
]


def run_layout(
    pool: WarmPool, directory: Path, *words: str, steps: int = STEPS
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train; return the metrics of each step, and the full state after the first and the last step."""
    words = (*BASE, *words, f"train.steps={steps}", "checkpoint.keep=0")
    if steps <= STEPS:
        metrics = get_step_metrics(pool.train(make_small_config(directory, *words, "checkpoint.interval=1"))[0])
    else:  # avoid a checkpoint per step
        metrics = get_step_metrics(pool.train(make_small_config(directory, *words), steps_to=1)[0])
        metrics += get_step_metrics(pool.train(make_small_config(directory, *words), resume_step=1)[0])
    state = {
        f"{step} {name}": tensor for step in (1, steps) for name, tensor in load_full_state(directory, step).items()
    }
    return metrics, state


def _fill(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of values that no state has."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype)


def load_full_state(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, assembled from the saved slices."""
    checkpoint = read_manifest(CheckpointStore(directory / "checkpoints").get_path(step))
    state = ShardedState(
        StateShard(
            name,
            entry.shape,
            entry.dtype,
            Box.from_shape(entry.shape),
            _fill(entry.shape, getattr(torch, entry.dtype)),
        )
        for name, entry in checkpoint.index.items()
    )
    read_state(checkpoint, state)
    return {shard.name: shard.tensor for shard in state}
