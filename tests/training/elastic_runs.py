"""Runs with train.deterministic=elastic, which have the same bits under every layout, and the comparison of bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from raytrain_hpc.runtime.worker_spec import CustomModel
from tests.parallel.layout_run import GPT2, LLAMA, load_full_state
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS = 6
# 12 sequences in 6 microbatches, so that five ranks get 1, 1, 1, 1, 2; clipping and dropout on, odd sizes.
BASE = [
    "train.deterministic=elastic",
    "train.micro_batch_size=2",
    "optimizer.lr=3e-3",
    f"train.steps={STEPS}",
    "eval.interval=3",
    "train.max_grad_norm=0.5",
    "model.dropout=0.1",
    "model.vocab_size=65",
    "model.ffn_size=50",
    "train.seq_len=15",
]
MODELS = {
    "gpt2": [*GPT2, "model.tie_embeddings=true"],
    "llama": [*LLAMA, "model.num_kv_heads=2", "model.tie_embeddings=false"],
    "moe": [*LLAMA, "model.num_experts=5", "model.num_kv_heads=1"],
}
LAYOUTS = {
    "ddp-2": ["cluster.workers=2"],
    "ddp-3": ["cluster.workers=3", "parallel.bucket_mib=1"],
    "ddp-5": ["cluster.workers=5"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero1-4": ["cluster.workers=4", "parallel.zero=1"],  # ranks have one or two microbatches
    "zero2-3": ["cluster.workers=3", "parallel.zero=2"],
    "zero3-4": ["cluster.workers=4", "parallel.zero=3"],
    "zero3-5, recompute": ["cluster.workers=5", "parallel.zero=3", "parallel.activation_checkpointing=full"],
    "hsdp2-2x2": ["cluster.workers=4", "parallel.zero=2", "parallel.dp_replicate=2", "parallel.dp_shard=2"],
}

Bits = tuple[list[tuple[float, ...]], str]  # metrics of every step, and a hash of the last state
RunOnce = Callable[..., Bits]


def run_bits(pool: WarmPool, directory: Path, *words: str, custom: CustomModel | None = None) -> Bits:
    """Return loss, gradient norm and validation loss of every step, and a hash of the state after the last one."""
    return get_bits(pool.train(make_small_config(directory, *BASE, *words), custom=custom)[0], directory)


def get_bits(records: list[dict[str, Any]], directory: Path) -> Bits:
    """Return the bits of a run from its first step on, by the records of its first rank, and its directory."""
    keys = ("train/loss", "train/grad_norm", "val/loss")
    steps = [tuple(step[key] for key in keys if key in step) for step in get_step_metrics(records)]
    return steps, _compute_digest(directory, len(steps))


def run_through_layouts(pool: WarmPool, directory: Path, *words: str) -> tuple[list[float], str]:
    """Train every step on another layout; return the losses, and a hash of the state after the last step."""
    losses = []
    for step, layout in enumerate(("zero2-3", "ddp-5", "hsdp2-2x2", "ddp-2", "zero1-2", "zero3-4")):
        config = make_small_config(directory, *BASE, *words, *LAYOUTS[layout])
        losses += get_step_metrics(pool.train(config, resume_step=step or None, steps_to=step + 1)[0])
    return [step["train/loss"] for step in losses], _compute_digest(directory, STEPS)


def _compute_digest(directory: Path, step: int) -> str:
    """Return a hash of the whole state after a step, but for what callbacks keep."""
    state, digest = load_full_state(directory, step), hashlib.sha256()
    for name in sorted(state.keys() - {"callbacks.values"}):
        digest.update(name.encode() + state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
