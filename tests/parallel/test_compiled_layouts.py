"""Compiled blocks under every layout: losses, gradient norms, graphs, and no compilation after the first steps."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch._dynamo import config

from raytrain_hpc.parallel.mesh_axis import Axis
from tests.parallel.compiled_run import CompiledRun, run_compiled
from tests.parallel.layout_run import GPT2, LLAMA
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS, FIRST_STEPS = 4, 2
BASE = [
    "model.vocab_size=65",
    "model.ffn_size=50",
    "train.seq_len=15",
    "train.micro_batch_size=3",
    f"train.steps={STEPS}",
    "optimizer.lr=3e-3",
]
MODELS = {
    "gpt2": [*GPT2, "model.tie_embeddings=true", "model.dropout=0.1"],
    "llama": [*LLAMA, "model.num_kv_heads=2"],
    "moe": [
        *LLAMA,
        "model.num_kv_heads=1",
        "model.num_experts=5",
        "model.shared_expert_size=23",
        "model.load_balancing=bias",
    ],
}

TWO, FOUR = ["cluster.workers=2"], ["cluster.workers=4"]
FULL, SELECTIVE = (f"parallel.activation_checkpointing={policy}" for policy in ("full", "selective"))
DEEP = "model.num_layers=4"
ONE_GRAPH = {
    "gpt2: ring, recompute": [*TWO, "parallel.cp=2", FULL],
    "gpt2: pp": [*TWO, "parallel.pp=2", DEEP],
    "llama: zero3, selective": [*TWO, "parallel.zero=3", SELECTIVE],
    "llama: tp-3": ["cluster.workers=3", "parallel.tp=3", SELECTIVE],  # replicated keys and values
    "llama: tp x zero1, recompute": [*FOUR, "parallel.tp=2", "parallel.zero=1", FULL],
    "llama: ring, documents": [*TWO, "parallel.cp=2", "data.packing=documents"],
    "gpt2: Ulysses, bf16": [*TWO, "parallel.cp=2", "parallel.ulysses=2", "train.dtype=bf16"],
    "llama: LoRA, tp": [*TWO, "lora.rank=3", "parallel.tp=2"],
    "moe: tp, recompute": [*TWO, "parallel.tp=2", FULL],
    "moe: ring": [*TWO, "parallel.cp=2"],
}
SEVERAL_GRAPHS = {
    "llama: zbv, recompute": [*TWO, "parallel.pp=2", "parallel.pp_schedule=zbv", FULL, DEEP],
    "llama: tiles": [*TWO, "parallel.zero=3", "parallel.tile_mib=0.004"],
    "gpt2: tiles, selective": [*TWO, "parallel.zero=3", "parallel.tile_mib=0.004", SELECTIVE],
    "moe: ep, recompute": [*TWO, "parallel.ep=2", FULL],
}


def set_recompile_limits(rank: int, rendezvous: Any, limits: tuple[int, int]) -> tuple[int, int]:
    """Let this process, which forgets what it has compiled, keep so many versions of a function; return the limits."""
    torch.compiler.reset()
    earlier = config.recompile_limit, config.accumulated_recompile_limit
    config.recompile_limit, config.accumulated_recompile_limit = limits
    return earlier


def test_runs_are_compiled_after_others_in_the_same_process(pool: WarmPool) -> None:
    """The compiler gives up on a function after some versions of it. In bf16, what is not compiled has other bits."""
    words = [*BASE, *MODELS["llama"], "model.num_layers=1", "train.dtype=bf16", "train.compile=true"]
    (limits,) = pool.call(set_recompile_limits, 1, (8, 64))
    expected = get_step_metrics(pool.train(make_small_config(None, *words))[0])
    pool.call(set_recompile_limits, 1, (1, 1))
    pool.train(make_small_config(None, *words, "train.seq_len=9"))
    steps = get_step_metrics(pool.train(make_small_config(None, *words))[0])
    pool.call(set_recompile_limits, 1, limits)
    assert [step["train/grad_norm"] for step in steps] == [step["train/grad_norm"] for step in expected]


def check_losses(pool: WarmPool, runs: list[CompiledRun], *words: str) -> None:
    expected = get_step_metrics(pool.train(make_small_config(None, *words))[0])
    for run in runs:
        assert run.losses == pytest.approx([step["train/loss"] for step in expected], rel=1e-5)
        assert run.grad_norms == pytest.approx([step["train/grad_norm"] for step in expected], rel=1e-4)
        assert 0 < run.num_graphs[FIRST_STEPS - 1] == run.num_graphs[-1], run.num_graphs


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_a_block_is_one_graph(pool: WarmPool, name: str) -> None:
    words = [*BASE, *MODELS[name.split(":")[0]], *ONE_GRAPH[name]]
    runs = run_compiled(pool, make_small_config(None, *words, "train.compile=true"), steps=STEPS)
    check_losses(pool, runs, *words)
    assert all(run.split_reasons == [] for run in runs)


def test_operators_keep_no_group_alive() -> None:
    from raytrain_hpc.parallel.collective_ops import set_axes

    axis: Any = Axis("tp", object(), 0, 2)  # type: ignore[arg-type]
    set_axes({"tp": axis})
    reference = weakref.ref(axis)
    del axis
    assert reference() is None


def test_groups_formed_anew_need_no_compilation(pool: WarmPool) -> None:
    """After a fault, on more ranks too, since the shapes are those of a microbatch."""
    words = [*BASE, *MODELS["gpt2"], "parallel.tp=2", "train.compile=true"]
    two, four = (make_small_config(None, *words, *workers) for workers in (TWO, FOUR))
    first = run_compiled(pool, two, steps=2)
    again = run_compiled(pool, two, steps=2, forget=False)
    assert [run.losses for run in again] == [run.losses for run in first]
    grown = run_compiled(pool, four, steps=2, forget=False)
    for rank in range(2):
        assert again[rank].num_graphs == grown[rank].num_graphs == [first[rank].num_graphs[-1]] * 2


@pytest.mark.parametrize("name", SEVERAL_GRAPHS)
def test_blocks_with_python_code_inside_are_split(pool: WarmPool, name: str) -> None:
    words = [*BASE, *MODELS[name.split(":")[0]], *SEVERAL_GRAPHS[name]]
    runs = run_compiled(pool, make_small_config(None, *words, "train.compile=true"), steps=STEPS)
    check_losses(pool, runs, *words)
    assert all(run.split_reasons for run in runs)
