"""Training options: activation checkpointing, compilation, dtypes, profiles, SGD, and a loss that is not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc.errors import ConfigError
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config

EXACT = ["train.dtype=fp64", "model.dropout=0.2", "train.micro_batch_size=4"]


def run_losses(pool: WarmPool, *overrides: str) -> list[float]:
    return [s["train/loss"] for s in get_step_metrics(pool.train(make_small_config(None, *overrides))[0])]


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("layout", [[], ["cluster.workers=2", "parallel.zero=3"]])
def test_recompute_keeps_the_losses(pool: WarmPool, policy: str, layout: list[str]) -> None:
    expected = run_losses(pool, *EXACT, *layout)
    assert run_losses(pool, *EXACT, *layout, f"parallel.activation_checkpointing={policy}") == expected


def test_compiled_blocks_keep_the_loss_curve(pool: WarmPool) -> None:
    one_layer = "model.num_layers=1"  # a cold compiler takes half a minute per block; tests/model compiles several
    # torch 2.11 cannot run the compiled backward pass of attention in fp64 on CPUs.
    dtype, bound = ("fp32", 1e-6) if torch.__version__.startswith("2.11.") else ("fp64", 1e-12)
    words = [*EXACT, one_layer, f"train.dtype={dtype}"]
    expected = run_losses(pool, *words)
    compiled = run_losses(pool, *words, "train.compile=true")
    assert compiled == pytest.approx(expected, rel=bound)


def test_bf16_stays_near_fp32_under_every_layout(pool: WarmPool) -> None:
    overrides = ["train.micro_batch_size=4", "train.steps=20", "optimizer.lr=1e-3"]
    exact = run_losses(pool, *overrides)
    for layout in (["cluster.workers=1"], ["cluster.workers=2"], ["cluster.workers=2", "parallel.zero=3"]):
        rounded = run_losses(pool, *overrides, "train.dtype=bf16", *layout)
        assert rounded != exact
        assert rounded == pytest.approx(exact, rel=5e-3)


def measure_residual_dtypes(trainer: Any) -> tuple[set[torch.dtype], list[float]]:
    """Train three steps; return the dtypes of the residual stream between blocks, and the losses."""
    dtypes = set()
    for block in trainer.model_step.model.modules[0].blocks().values():
        block.register_forward_pre_hook(lambda block, inputs: dtypes.add(inputs[0].dtype))
        block.register_forward_hook(lambda block, inputs, output: dtypes.add(output.dtype))
    return dtypes, [trainer.train_step(step).loss for step in range(3)]


@pytest.mark.parametrize("model", [[], ["model.norm=rmsnorm", "model.activation=swiglu", "model.qk_norm=true"]])
def test_a_bf16_residual_stream_is_that_of_sharded_weights(pool: WarmPool, model: list[str]) -> None:
    # The first update of AdamW is the sign of each gradient, which makes a whole step of a rounding error. Updates of
    # SGD change these losses by 4e-4 of their size; over so many positions, rounding does by 5e-6.
    words = [*model, "train.dtype=bf16", "train.global_batch_size=96", "train.micro_batch_size=24", "optimizer.lr=0.5"]
    words += ["cluster.workers=2", "optimizer.name=sgd", "train.max_grad_norm=0", "lr_scheduler.warmup_steps=0"]
    runs = {}
    for name, layout in {
        "fp32": [],
        "bf16": ["train.residual_dtype=bf16"],
        "zero": ["parallel.zero=3"],
    }.items():
        runs[name] = pool.inspect_trainers(measure_residual_dtypes, make_small_config(None, *words, *layout))[0]
    assert runs["fp32"][0] == {torch.float32}
    assert runs["bf16"][0] == runs["zero"][0] == {torch.bfloat16}
    assert runs["bf16"][1] == pytest.approx(runs["zero"][1], rel=2e-5)
    assert runs["fp32"][1] != runs["bf16"][1]


def test_a_bf16_residual_stream_needs_bf16_products() -> None:
    with pytest.raises(ConfigError, match="train.residual_dtype='bf16' .*train.dtype=fp32 computes in it"):
        make_small_config(None, "train.dtype=fp32", "train.residual_dtype=bf16")


def test_bf16_keeps_the_state_in_fp32(pool: WarmPool, tmp_path: Path) -> None:
    pool.train(make_small_config(tmp_path, "train.dtype=bf16", "cluster.workers=2", "parallel.zero=3"))
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000005" / "manifest.json").read_text())
    dtypes = {tensor["dtype"] for name, tensor in manifest["index"].items() if name != "updates"}  # their number
    assert dtypes == {"float32"}


def test_sgd_trains_without_optimizer_state(pool: WarmPool, tmp_path: Path) -> None:
    """SGD without momentum has no optimizer state, and reduces the loss."""
    overrides = ["optimizer.name=sgd", "optimizer.lr=0.5", "train.steps=30", "cluster.workers=2"]
    curve = [s["train/loss"] for s in get_step_metrics(pool.train(make_small_config(tmp_path, *overrides))[0])]
    assert curve[-1] < curve[0]
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000030" / "manifest.json").read_text())
    assert all(name.startswith("model.") for name in manifest["index"])


def test_nonfinite_loss_ends_the_run_before_a_checkpoint(pool: WarmPool, tmp_path: Path) -> None:
    overrides = [
        "optimizer.lr=1e30",
        "train.max_grad_norm=0",
        "lr_scheduler.warmup_steps=0",
        "optimizer.name=sgd",
        "checkpoint.interval=1",
    ]
    with pytest.raises(RankFailedError, match="not finite, twice; lower optimizer.lr"):
        pool.train(make_small_config(tmp_path, *overrides))


@pytest.mark.parametrize(
    ("profiler", "suffixes"), [("torch", [".kernels.json", ".trace.json"]), ("pyinstrument", [".html"])]
)
def test_profiler_covers_only_the_selected_ranks(
    pool: WarmPool, tmp_path: Path, profiler: str, suffixes: list[str]
) -> None:
    overrides = [f"profiler.name={profiler}", "profiler.ranks=[1]", "profiler.steps=[1,3]"]
    pool.train(make_small_config(tmp_path, "cluster.workers=2", *overrides))
    files = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in files] == [f"rank-00001{suffix}" for suffix in suffixes]
    assert all(path.stat().st_size > 1000 for path in files)
