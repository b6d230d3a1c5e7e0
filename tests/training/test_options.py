"""What the settings promise of a worker: recompute, compilation, types, profiles, and a loss that is not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config

EXACT = ["train.dtype=fp64", "model.dropout=0.2", "train.micro_batch=4"]


def losses(pool: WarmPool, *words: str) -> list[float]:
    return [s["train/loss"] for s in get_step_metrics(pool.train(make_small_config(None, *words))[0])]


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("layout", [[], ["cluster.workers=2", "parallel.zero=3"]])
def test_recompute_changes_no_number(pool: WarmPool, policy: str, layout: list[str]) -> None:
    plain = losses(pool, *EXACT, *layout)
    assert losses(pool, *EXACT, *layout, f"parallel.recompute={policy}") == plain


def test_compiled_blocks_give_the_same_curve(pool: WarmPool) -> None:
    one = "model.num_layers=1"  # a cold compiler takes half a minute a block; tests/model has one graph serve several
    plain = losses(pool, *EXACT, one)
    compiled = losses(pool, *EXACT, one, "train.compile=true")
    assert compiled == pytest.approx(plain, rel=1e-12)


def test_bf16_stays_near_fp32_under_every_layout(pool: WarmPool) -> None:
    words = ["train.micro_batch=4", "train.steps=20", "train.lr=1e-3"]
    exact = losses(pool, *words)
    for layout in (["cluster.workers=1"], ["cluster.workers=2"], ["cluster.workers=2", "parallel.zero=3"]):
        rounded = losses(pool, *words, "train.dtype=bf16", *layout)
        assert rounded != exact
        assert rounded == pytest.approx(exact, rel=5e-3)


def test_bf16_keeps_the_state_in_fp32(pool: WarmPool, tmp_path: Path) -> None:
    pool.train(make_small_config(tmp_path, "train.dtype=bf16", "cluster.workers=2", "parallel.zero=3"))
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000005" / "manifest.json").read_text())
    assert {tensor["dtype"] for tensor in manifest["index"].values()} == {"float32"}


def test_sgd_takes_plain_gradient_steps(pool: WarmPool, tmp_path: Path) -> None:
    """Without momentum there is no optimizer state, and it trains."""
    words = ["train.optimizer=sgd", "train.lr=0.5", "train.steps=30", "cluster.workers=2"]
    curve = [s["train/loss"] for s in get_step_metrics(pool.train(make_small_config(tmp_path, *words))[0])]
    assert curve[-1] < curve[0]
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000030" / "manifest.json").read_text())
    assert all(name.startswith("model.") for name in manifest["index"])


def test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint(pool: WarmPool, tmp_path: Path) -> None:
    words = ["train.lr=1e30", "train.grad_clip=0", "train.warmup=0", "train.optimizer=sgd", "checkpoint.every=1"]
    with pytest.raises(RankFailedError, match="not finite, twice; lower train.lr"):
        pool.train(make_small_config(tmp_path, *words))


@pytest.mark.parametrize(("profiler", "suffix"), [("torch", ".trace.json"), ("pyinstrument", ".html")])
def test_profiles_of_chosen_ranks_and_steps(pool: WarmPool, tmp_path: Path, profiler: str, suffix: str) -> None:
    words = [f"observe.profile={profiler}", "observe.profile_ranks=[1]", "observe.profile_steps=[1,3]"]
    pool.train(make_small_config(tmp_path, "cluster.workers=2", *words))
    assert [path.name for path in (tmp_path / "profile").iterdir()] == [f"rank-00001{suffix}"]
    assert (tmp_path / "profile" / f"rank-00001{suffix}").stat().st_size > 1000
