"""train.deterministic=elastic: every data-parallel degree and ZeRO stage gives the same bits as one process."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from raytrain_hpc.errors import ConfigError, LayoutError
from raytrain_hpc.parallel.pairwise import PairwiseSum, open_nodes, pairwise_total
from tests.parallel.numbers import GPT2, LLAMA, whole_state
from tests.pool import WarmPool, small, steps_of

STEPS = 6
# 12 sequences in 6 microbatches, so that five ranks get 1, 1, 1, 1, 2; clipping and dropout on, sizes that nothing divides.
BASE = [
    "train.deterministic=elastic",
    "train.micro_batch=2",
    "train.lr=3e-3",
    f"train.steps={STEPS}",
    "train.eval_every=3",
    "train.grad_clip=0.5",
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
    "zero2-3": ["cluster.workers=3", "parallel.zero=2"],
    "zero3-4": ["cluster.workers=4", "parallel.zero=3"],
    "zero3-5, recompute": ["cluster.workers=5", "parallel.zero=3", "parallel.recompute=full"],
    "hsdp2-2x2": ["cluster.workers=4", "parallel.zero=2", "parallel.dp_replicate=2", "parallel.dp_shard=2"],
}


def bits(pool: WarmPool, directory: Path, *words: str) -> tuple[list[tuple[float, ...]], str]:
    """Loss, gradient norm and validation loss of every step, and a hash of the whole state after the last."""
    records = steps_of(pool.train(small(directory, *BASE, *words))[0])
    state, digest = whole_state(directory, STEPS), hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].numpy().tobytes())
    keys = ("train/loss", "train/grad_norm", "val/loss")
    return [tuple(step[key] for key in keys if key in step) for step in records], digest.hexdigest()


@pytest.fixture(scope="module")
def alone(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory):
    made = {}

    def of(*words: str):
        if words not in made:
            made[words] = bits(pool, tmp_path_factory.mktemp("alone"), *words)
        return made[words]

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["gpt2"])
def test_every_layout_gives_the_same_bits(pool: WarmPool, alone, tmp_path: Path, model: str, layout: str) -> None:
    assert bits(pool, tmp_path, *MODELS[model], *LAYOUTS[layout]) == alone(*MODELS[model])
