"""train.deterministic=elastic: random combinations of features have the same bits at two data-parallel degrees."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.training.elastic_runs import MODELS, run_bits
from tests.warm_pool import WarmPool

MODEL_PARALLEL = {
    "one rank": [],
    "tp": ["parallel.tp=2"],
    "ring": ["parallel.cp=2"],
    "ulysses": ["parallel.cp=2", "parallel.ulysses=2"],
    "1f1b": ["parallel.pp=2"],
    "zbv": ["parallel.pp=2", "parallel.pp_schedule=zbv", "model.num_layers=4"],
}
FEATURES = [
    "parallel.activation_checkpointing=full",
    "parallel.activation_checkpointing=selective",
    "parallel.activation_offload=cpu",
    "train.loss_chunks=3",
    "data.packing=documents",
    "lora.rank=2",
    "optimizer.name=muon",
    "optimizer.name=sgd",
    "parallel.offload=cpu",
    "model.load_balancing=bias",
    "model.shared_expert_size=24",
    "parallel.quantize=weights",
    "parallel.tile_mib=0.001",
    "train.residual_dtype=bf16",
    "train.callbacks=[{name: ema, args: {decay: 0.5}}]",
]


def draw(seed: int) -> tuple[list[str], list[str]]:
    """Draw the settings of a run, and those with which more ranks run it."""
    generator = random.Random(seed)
    model, axis = generator.choice(["gpt2", "llama", "moe"]), generator.choice(list(MODEL_PARALLEL))
    dtype, zero = generator.choice(["fp32", "bf16", "float8"]), generator.choice([0, 1, 2, 3, 3])
    features = generator.sample(FEATURES, generator.randint(0, 4))
    features = [word for word in features if is_possible(word, features, model, dtype, zero)]
    num_ranks = 1 if axis == "one rank" else 2
    words = [*MODELS[model], f"train.dtype={dtype}", f"parallel.zero={zero}", *MODEL_PARALLEL[axis], *features]
    if axis == "ulysses":
        words.append("model.num_kv_heads=2")
    degree = generator.choice([2, 3, 4, 5] if num_ranks == 1 else [2, 3])
    other = [f"cluster.workers={degree * num_ranks}"]
    if zero and degree == 4 and generator.random() < 0.5:
        other.append("parallel.dp_replicate=2")
    elif zero and generator.random() < 0.2:
        other.append("parallel.dp_shard=1")
    if model == "moe" and degree % 2 == 0 and "parallel.quantize=weights" not in features:
        other.append("parallel.ep=2")
    return [*words, f"cluster.workers={num_ranks}"], [*words, *other]


def is_possible(word: str, features: list[str], model: str, dtype: str, zero: int) -> bool:
    """Return whether a feature is not refused, or without meaning, beside the others."""
    if word in ("model.load_balancing=bias", "model.shared_expert_size=24"):
        return model == "moe"
    if word == "parallel.offload=cpu":
        return "optimizer.name=sgd" not in features
    if word == "train.residual_dtype=bf16":
        return dtype != "fp32"
    return zero >= {"parallel.quantize=weights": 1, "parallel.tile_mib=0.001": 3}.get(word, 0)


@pytest.mark.parametrize("seed", range(120))
def test_more_ranks_have_the_same_bits(pool: WarmPool, tmp_path: Path, seed: int) -> None:
    few, many = draw(seed)
    assert run_bits(pool, tmp_path / "few", *few) == run_bits(pool, tmp_path / "many", *many), many
