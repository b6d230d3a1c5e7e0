"""LoRA under every layout: the losses and adapters of one process, with frozen weights unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.layout_run import GPT2, LLAMA, load_full_state
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS = 3
BASE = [
    "model.vocab_size=65",
    "model.ffn_size=50",
    "model.num_layers=4",
    "train.seq_len=15",
    "train.micro_batch_size=3",
    "train.dtype=fp64",
    f"train.steps={STEPS}",
    "optimizer.lr=3e-3",
    "lora.rank=3",
    "lora.alpha=6",
]
MODELS = {
    "gpt2": [*GPT2, "model.tie_embeddings=true", "model.dropout=0.1"],
    "llama": [*LLAMA, "model.num_kv_heads=2"],
    "moe": [*LLAMA, "model.num_kv_heads=1", "model.num_experts=5", "model.shared_expert_size=23"],
}
LAYOUTS = {
    "tp 2": ["cluster.workers=2", "parallel.tp=2"],
    "tp 3": ["cluster.workers=3", "parallel.tp=3"],  # replicated keys and values
    "ring 2": ["cluster.workers=2", "parallel.cp=2"],
    "zbv": ["cluster.workers=2", "parallel.pp=2", "parallel.pp_schedule=zbv"],
    "tp 2 x pp 2": ["cluster.workers=4", "parallel.tp=2", "parallel.pp=2"],
    "tp 2 x ZeRO-3": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=3"],
    "ep 2 x tp 2": ["cluster.workers=4", "parallel.ep=2", "parallel.tp=2"],
    "tiles": ["cluster.workers=2", "parallel.zero=3", "parallel.tile_mib=0.005"],
    "tiles x tp 2": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=3", "parallel.tile_mib=0.005"],
}
CASES = [
    ("gpt2", "tp 2"),
    ("gpt2", "zbv"),
    ("gpt2", "tiles"),
    ("llama", "tp 3"),
    ("llama", "ring 2"),
    ("llama", "tp 2 x pp 2"),
    ("llama", "tiles x tp 2"),
    ("moe", "tp 2 x ZeRO-3"),
    ("moe", "ep 2 x tp 2"),
]


def train(pool: WarmPool, directory: Path, *words: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    steps = get_step_metrics(pool.train(make_small_config(directory, *BASE, *words))[0])
    return [step["train/loss"] for step in steps], load_full_state(directory, STEPS)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_losses_and_adapters_equal_those_of_one_process(
    pool: WarmPool, tmp_path: Path, model: str, layout: str
) -> None:
    expected_losses, expected = train(pool, tmp_path / "one", *MODELS[model])
    losses, state = train(pool, tmp_path / "cut", *MODELS[model], *LAYOUTS[layout])
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert state.keys() == expected.keys()
    adapters = [name for name in state if name.startswith("model.") and ".lora_" in name]
    assert len(adapters) >= 2 * 2 * 4 and all(state[name].any() for name in adapters)
    for name, tensor in state.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-9, atol=1e-11), name
