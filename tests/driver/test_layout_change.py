"""A checkpoint of four ranks goes on, on fewer ranks and another ZeRO stage, along the same curve."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

# Twelve microbatches of one: four ranks have three each, three ranks four, two ranks six.
WORDS = ["model.dropout=0.1", "train.steps=10", "train.micro_batch=1"]
FOUR = ["cluster.workers=4", "parallel.zero=3"]
OTHERS = {
    "2 ranks, DDP": ["cluster.workers=2"],
    "3 ranks, ZeRO-2": ["cluster.workers=3", "parallel.zero=2"],
}


def losses(pool: WarmPool, directory: Path, *words: str, **part: int) -> list[float]:
    return [
        metrics["train/loss"]
        for metrics in get_step_metrics(pool.train(make_small_config(directory, *WORDS, *words), **part)[0])
    ]


@pytest.fixture(scope="module")
def undisturbed(pool: WarmPool, tmp_path_factory) -> list[float]:
    return losses(pool, tmp_path_factory.mktemp("undisturbed"), *FOUR)


@pytest.fixture(scope="module")
def saved_at_5(pool: WarmPool, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    losses(pool, directory, *FOUR, steps_to=5)
    return directory


@pytest.mark.parametrize("layout", OTHERS)
def test_resume_on_another_layout(pool: WarmPool, undisturbed, saved_at_5: Path, tmp_path, layout: str) -> None:
    shutil.copytree(saved_at_5, tmp_path / "run")
    resumed = losses(pool, tmp_path / "run", *OTHERS[layout], resume_step=5)
    assert resumed == pytest.approx(undisturbed[5:], rel=1e-6)
    assert len(undisturbed) == 10 and resumed != pytest.approx(undisturbed[:5], rel=1e-4)


def test_resume_on_the_same_layout_is_exact(pool: WarmPool, undisturbed, saved_at_5: Path, tmp_path) -> None:
    shutil.copytree(saved_at_5, tmp_path / "run")
    assert losses(pool, tmp_path / "run", *FOUR, resume_step=5) == undisturbed[5:]
