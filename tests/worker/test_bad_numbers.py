"""A step whose numbers are not finite: computed again, and only if they still are not, given up."""

from __future__ import annotations

from math import isfinite, isnan
from pathlib import Path
from typing import Any

import pytest

from tests.pool import RankFailed, WarmPool, small, steps_of

WORDS = ["train.steps=6", "train.micro_batch=2", "model.dropout=0.1"]
LAYOUTS = {
    "ddp-2": ["cluster.workers=2"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
    "pp-2": ["cluster.workers=2", "parallel.pp=2"],
    "moe": ["cluster.workers=2", "model.num_experts=4", "model.balance=bias"],
}


def records(pool: WarmPool, run_dir: Path, *words: str, times: int = 0, rank: int = 1) -> list[dict[str, Any]]:
    faults = ", ".join([f"{{kind: nan, rank: {rank}, step: 4}}"] * times)
    return pool.train(small(run_dir, *WORDS, *words, f"fault.inject=[{faults}]"))[0]


def losses(found: list[dict[str, Any]]) -> list[float]:
    return [metrics["train/loss"] for metrics in steps_of(found)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_once_is_as_if_it_had_not_been(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    undisturbed = losses(records(pool, tmp_path / "a", *LAYOUTS[layout]))
    found = records(pool, tmp_path / "b", *LAYOUTS[layout], times=1)
    assert losses(found) == undisturbed
    (incident,) = [record for record in found if record["type"] == "incident"]
    assert (incident["kind"], incident["operation"]) == ("not finite", "training step 4")
    assert incident["rank"] == (0 if layout == "pp-2" else 1), "the first of those that saw that microbatch"
    assert "finite when computed again" in incident["reason"] and incident["recovered_s"] > 0


def test_twice_ends_the_run(pool: WarmPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"step 4: loss nan .* not finite, twice; lower train.lr.*fault.on_nan=skip"):
        records(pool, tmp_path, "cluster.workers=2", times=2)


def test_or_is_skipped_with_a_record(pool: WarmPool, tmp_path: Path) -> None:
    """The state is that of the step before, and the rest goes on from it."""
    words = ["cluster.workers=2", "fault.on_nan=skip", "checkpoint.every=1", "checkpoint.keep=0"]
    found = records(pool, tmp_path, *words, times=2)
    made = losses(found)
    assert len(made) == 6 and isnan(made[3]) and all(map(isfinite, made[:3] + made[4:]))
    before, after = (shards(tmp_path / "checkpoints" / f"step-0000000{step}") for step in (3, 4))
    assert before == after
    (incident,) = [record for record in found if record["type"] == "incident"]
    assert "the same when computed again" in incident["reason"]


def shards(checkpoint: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))]
