"""Steps with a loss or gradient norm that is not finite: recomputed, then rejected if they are still bad."""

from __future__ import annotations

from math import isfinite, isnan
from pathlib import Path
from typing import Any

import pytest

from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config

OVERRIDES = ["train.steps=6", "train.micro_batch_size=2", "model.dropout=0.1"]
LAYOUTS = {
    "ddp-2": ["cluster.workers=2"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
    "pp-2": ["cluster.workers=2", "parallel.pp=2"],
    "moe": ["cluster.workers=2", "model.num_experts=4", "model.load_balancing=bias"],
}


def run_records(pool: WarmPool, run_dir: Path, *overrides: str, times: int = 0, rank: int = 1) -> list[dict[str, Any]]:
    faults = ", ".join([f"{{kind: nan, rank: {rank}, step: 4}}"] * times)
    return pool.train(make_small_config(run_dir, *OVERRIDES, *overrides, f"fault.inject=[{faults}]"))[0]


def get_losses(records: list[dict[str, Any]]) -> list[float]:
    return [metrics["train/loss"] for metrics in get_step_metrics(records)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_that_does_not_recur_keeps_the_loss_curve(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    undisturbed = get_losses(run_records(pool, tmp_path / "a", *LAYOUTS[layout]))
    records = run_records(pool, tmp_path / "b", *LAYOUTS[layout], times=1)
    assert get_losses(records) == undisturbed
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert (incident["kind"], incident["operation"]) == ("not finite", "training step 4")
    assert incident["rank"] == (0 if layout == "pp-2" else 1), "the lowest rank that computes that microbatch"
    assert "gone when recomputed" in incident["reason"] and incident["recovered_s"] > 0


def test_nan_that_recurs_ends_the_run(pool: WarmPool, tmp_path: Path) -> None:
    with pytest.raises(
        RankFailedError, match=r"step 4: loss nan .* not finite, twice; lower optimizer.lr.*fault.on_nan=skip"
    ):
        run_records(pool, tmp_path, "cluster.workers=2", times=2)


def test_nan_that_recurs_is_skipped_with_an_incident(pool: WarmPool, tmp_path: Path) -> None:
    """A skipped step leaves the state unchanged, and training continues from it."""
    overrides = ["cluster.workers=2", "fault.on_nan=skip", "checkpoint.interval=1", "checkpoint.keep=0"]
    records = run_records(pool, tmp_path, *overrides, times=2)
    losses = get_losses(records)
    assert len(losses) == 6 and isnan(losses[3]) and all(map(isfinite, losses[:3] + losses[4:]))
    before, after = (read_shards(tmp_path / "checkpoints" / f"step-0000000{step}") for step in (3, 4))
    assert before == after
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert "bad again when recomputed" in incident["reason"]


@pytest.mark.parametrize("layout", ["ddp-2", "zero3-3", "pp-2"])
def test_rollback_equals_skipping_all_steps_since_the_checkpoint(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    """A bad step 4 with a checkpoint of step 2 equals a run that skips steps 3 and 4."""
    overrides = [*LAYOUTS[layout], "train.deterministic=elastic"]
    skipping = ["fault.on_nan=skip", f"fault.inject=[{format_faults((3, 2), (4, 2))}]"]
    skipped = get_losses(pool.train(make_small_config(tmp_path / "a", *OVERRIDES, *overrides, *skipping))[0])
    rolling_back = ["fault.on_nan=rollback", f"fault.inject=[{format_faults((4, 2))}]"]
    config = make_small_config(tmp_path / "b", *OVERRIDES, *overrides, *rolling_back)
    pool.train(config, steps_to=2)
    records = pool.train(config, resume_step=2)[0]
    assert get_losses(records)[2:] == skipped[4:] and isnan(get_losses(records)[1])
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert incident["reason"].endswith("rolled back to step 2") and incident["steps_lost"] == 1
    assert read_shards(tmp_path / "a" / "checkpoints" / "step-00000006") == read_shards(
        tmp_path / "b" / "checkpoints" / "step-00000006"
    )


def test_rollback_without_a_checkpoint_ends_the_run(pool: WarmPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=r"step 4: fault.on_nan=rollback, but there is no checkpoint"):
        run_records(pool, tmp_path, "cluster.workers=2", "fault.on_nan=rollback", times=2)


def test_bad_steps_in_a_row_end_the_run(pool: WarmPool, tmp_path: Path) -> None:
    overrides = ["cluster.workers=2", "fault.on_nan=skip", "fault.max_failures=1"]
    faults = f"fault.inject=[{format_faults((3, 2), (4, 2))}]"
    with pytest.raises(RankFailedError, match=r"step 4: .* 2 bad steps in a row exceed fault.max_failures=1"):
        pool.train(make_small_config(tmp_path, *OVERRIDES, *overrides, faults))


def test_loss_spike_is_detected_from_recent_losses(pool: WarmPool, tmp_path: Path) -> None:
    """A spike that does not recur changes nothing. One that recurs is skipped, also after a resume."""
    overrides = [
        *OVERRIDES,
        "cluster.workers=2",
        "train.steps=44",
        "fault.loss_spike_deviations=8",
        "fault.on_nan=skip",
    ]
    undisturbed = pool.train(make_small_config(tmp_path / "a", *overrides))[0]
    once = pool.train(
        make_small_config(tmp_path / "b", *overrides, f"fault.inject=[{format_faults((40, 1), kind='spike')}]")
    )[0]
    assert get_losses(once) == get_losses(undisturbed)
    assert [record["kind"] for record in once if record["type"] == "incident"] == ["loss spike"]
    twice = make_small_config(tmp_path / "c", *overrides, f"fault.inject=[{format_faults((40, 2), kind='spike')}]")
    pool.train(twice, steps_to=36)
    records = pool.train(twice, resume_step=36)[0]
    assert (
        get_losses(records)[:3] == get_losses(undisturbed)[36:39]
        and get_losses(records)[3] > 5 * get_losses(undisturbed)[39]
    )
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert incident["rank"] == 1 and "bad again" in incident["reason"]


def test_spike_detection_may_change_between_checkpoints(pool: WarmPool, tmp_path: Path) -> None:
    """A checkpoint without recent losses resumes with spike detection, and one with them resumes without it."""
    without, detecting = (
        make_small_config(tmp_path, *OVERRIDES, f"fault.loss_spike_deviations={deviations}") for deviations in (0, 6)
    )
    pool.train(without, steps_to=2)
    pool.train(detecting, resume_step=2, steps_to=4)
    assert len(get_losses(pool.train(without, resume_step=4)[0])) == 2


def format_faults(*times_at: tuple[int, int], kind: str = "nan") -> str:
    """Return injected faults on rank 1: for each (step, times) that many."""
    return ", ".join(f"{{kind: {kind}, rank: 1, step: {step}}}" for step, times in times_at for _ in range(times))


def read_shards(checkpoint: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))]
