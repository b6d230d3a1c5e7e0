"""A checkpoint of four ranks resumes on fewer ranks and another ZeRO stage, along the same loss curve."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

# Twelve microbatches of one sample: three per rank on four ranks, four on three, six on two.
WORDS = ["model.dropout=0.1", "train.steps=10", "train.micro_batch_size=1"]
FOUR = ["cluster.workers=4", "parallel.zero=3"]
OTHERS = {
    "2 ranks, DDP": ["cluster.workers=2"],
    "3 ranks, ZeRO-2": ["cluster.workers=3", "parallel.zero=2"],
}


def train_losses(pool: WarmPool, directory: Path, *words: str, **options: int) -> list[float]:
    return [
        metrics["train/loss"]
        for metrics in get_step_metrics(pool.train(make_small_config(directory, *WORDS, *words), **options)[0])
    ]


@pytest.fixture(scope="module")
def reference_losses(pool: WarmPool, tmp_path_factory) -> list[float]:
    return train_losses(pool, tmp_path_factory.mktemp("undisturbed"), *FOUR)


@pytest.fixture(scope="module")
def saved_at_5(pool: WarmPool, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    train_losses(pool, directory, *FOUR, steps_to=5)
    return directory


@pytest.mark.parametrize("layout", OTHERS)
def test_resuming_on_another_layout_keeps_the_loss_curve(
    pool: WarmPool, reference_losses, saved_at_5: Path, tmp_path, layout: str
) -> None:
    shutil.copytree(saved_at_5, tmp_path / "run")
    resumed = train_losses(pool, tmp_path / "run", *OTHERS[layout], resume_step=5)
    assert resumed == pytest.approx(reference_losses[5:], rel=1e-6)
    assert len(reference_losses) == 10 and resumed != pytest.approx(reference_losses[:5], rel=1e-4)


def test_resuming_on_the_same_layout_is_exact(pool: WarmPool, reference_losses, saved_at_5: Path, tmp_path) -> None:
    shutil.copytree(saved_at_5, tmp_path / "run")
    assert train_losses(pool, tmp_path / "run", *FOUR, resume_step=5) == reference_losses[5:]
