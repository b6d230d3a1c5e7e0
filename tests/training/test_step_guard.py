"""A step whose numbers are not finite: computed again, and only if they still are not, given up."""

from __future__ import annotations

from math import isfinite, isnan
from pathlib import Path
from typing import Any

import pytest

from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config

WORDS = ["train.steps=6", "train.micro_batch=2", "model.dropout=0.1"]
LAYOUTS = {
    "ddp-2": ["cluster.workers=2"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
    "pp-2": ["cluster.workers=2", "parallel.pp=2"],
    "moe": ["cluster.workers=2", "model.num_experts=4", "model.balance=bias"],
}


def records(pool: WarmPool, run_dir: Path, *words: str, times: int = 0, rank: int = 1) -> list[dict[str, Any]]:
    faults = ", ".join([f"{{kind: nan, rank: {rank}, step: 4}}"] * times)
    return pool.train(make_small_config(run_dir, *WORDS, *words, f"fault.inject=[{faults}]"))[0]


def losses(found: list[dict[str, Any]]) -> list[float]:
    return [metrics["train/loss"] for metrics in get_step_metrics(found)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_once_is_as_if_it_had_not_been(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    undisturbed = losses(records(pool, tmp_path / "a", *LAYOUTS[layout]))
    found = records(pool, tmp_path / "b", *LAYOUTS[layout], times=1)
    assert losses(found) == undisturbed
    (incident,) = [record for record in found if record["type"] == "incident"]
    assert (incident["kind"], incident["operation"]) == ("not finite", "training step 4")
    assert incident["rank"] == (0 if layout == "pp-2" else 1), "the first of those that saw that microbatch"
    assert "gone when computed again" in incident["reason"] and incident["recovered_s"] > 0


def test_twice_ends_the_run(pool: WarmPool, tmp_path: Path) -> None:
    with pytest.raises(
        RankFailedError, match=r"step 4: loss nan .* not finite, twice; lower train.lr.*fault.on_nan=skip"
    ):
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


@pytest.mark.parametrize("layout", ["ddp-2", "zero3-3", "pp-2"])
def test_going_back_is_skipping_all_steps_since_the_checkpoint(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    """Not finite at step 4 with a checkpoint of step 2: as if steps 3 and 4 had both been skipped."""
    words = [*LAYOUTS[layout], "train.deterministic=elastic"]
    skipping = ["fault.on_nan=skip", f"fault.inject=[{faults((3, 2), (4, 2))}]"]
    skipped = losses(pool.train(make_small_config(tmp_path / "a", *WORDS, *words, *skipping))[0])
    going_back = ["fault.on_nan=rollback", f"fault.inject=[{faults((4, 2))}]"]
    config = make_small_config(tmp_path / "b", *WORDS, *words, *going_back)
    pool.train(config, steps_to=2)
    found = pool.train(config, resume_step=2)[0]
    assert losses(found)[2:] == skipped[4:] and isnan(losses(found)[1])
    (incident,) = [record for record in found if record["type"] == "incident"]
    assert incident["reason"].endswith("went back to the state of step 2") and incident["steps_lost"] == 1
    assert shards(tmp_path / "a" / "checkpoints" / "step-00000006") == shards(
        tmp_path / "b" / "checkpoints" / "step-00000006"
    )


def test_nowhere_to_go_back_to(pool: WarmPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"step 4: fault.on_nan=rollback, but there is no checkpoint"):
        records(pool, tmp_path, "cluster.workers=2", "fault.on_nan=rollback", times=2)


def test_bad_steps_in_a_row_end_the_run(pool: WarmPool, tmp_path: Path) -> None:
    words = ["cluster.workers=2", "fault.on_nan=skip", "fault.max_failures=1"]
    spoilt = f"fault.inject=[{faults((3, 2), (4, 2))}]"
    with pytest.raises(RankFailedError, match=r"step 4: .* and so were the 1 before it \(fault.max_failures=1\)"):
        pool.train(make_small_config(tmp_path, *WORDS, *words, spoilt))


def test_a_spike_is_judged_by_the_losses_before_it(pool: WarmPool, tmp_path: Path) -> None:
    """Once: as if it had not been. Twice: skipped; and judged alike by a run that went on from a checkpoint."""
    words = [*WORDS, "cluster.workers=2", "train.steps=44", "fault.spike_deviations=8", "fault.on_nan=skip"]
    undisturbed = pool.train(make_small_config(tmp_path / "a", *words))[0]
    once = pool.train(make_small_config(tmp_path / "b", *words, f"fault.inject=[{faults((40, 1), kind='spike')}]"))[0]
    assert losses(once) == losses(undisturbed)
    assert [record["kind"] for record in once if record["type"] == "incident"] == ["loss spike"]
    twice = make_small_config(tmp_path / "c", *words, f"fault.inject=[{faults((40, 2), kind='spike')}]")
    pool.train(twice, steps_to=36)
    found = pool.train(twice, resume_step=36)[0]
    assert losses(found)[:3] == losses(undisturbed)[36:39] and losses(found)[3] > 5 * losses(undisturbed)[39]
    (incident,) = [record for record in found if record["type"] == "incident"]
    assert incident["rank"] == 1 and "the same" in incident["reason"]


def test_spikes_may_be_looked_for_from_some_checkpoint_on(pool: WarmPool, tmp_path: Path) -> None:
    """A checkpoint without recent losses is gone on from with that setting, and one with them without it."""
    without, looking = (make_small_config(tmp_path, *WORDS, f"fault.spike_deviations={one}") for one in (0, 6))
    pool.train(without, steps_to=2)
    pool.train(looking, resume_step=2, steps_to=4)
    assert len(losses(pool.train(without, resume_step=4)[0])) == 2


def faults(*times_at: tuple[int, int], kind: str = "nan") -> str:
    """For each (step, times) that many faults on rank 1."""
    return ", ".join(f"{{kind: {kind}, rank: 1, step: {step}}}" for step, times in times_at for _ in range(times))


def shards(checkpoint: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))]
