"""Learning-rate schedules compared with independently written closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc import start, train
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.optim.lr_scheduler import LearningRate, compute_peak_lr, learning_rate
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config


def make_config(**scheduler: object) -> Config:
    settings = {"warmup_steps": 10, "min_lr": 0.125} | scheduler
    return load_config({"train": {"steps": 100}, "optimizer": {"lr": 0.5}, "lr_scheduler": settings})


def test_warmup_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    for schedule in ("cosine", "linear", "polynomial", "inverse_sqrt", "wsd", "constant"):
        rates = [learning_rate(make_config(name=schedule), step) for step in range(11)]
        assert rates[:10] == pytest.approx([0.05 * k for k in range(1, 11)], rel=1e-15)
        assert rates[9] == 0.5 and (rates[10] == 0.5 or schedule == "inverse_sqrt")


def test_without_warmup_the_peak_comes_first() -> None:
    assert learning_rate(make_config(warmup_steps=0, name="cosine"), 0) == 0.5


def test_cosine_has_its_end_points_and_is_symmetric() -> None:
    config = make_config(name="cosine")
    assert learning_rate(config, 10) == 0.5
    assert learning_rate(config, 55) == pytest.approx((0.5 + 0.125) / 2, rel=1e-15)
    assert learning_rate(config, 100) == learning_rate(config, 150) == 0.125
    for k in range(46):
        assert learning_rate(config, 10 + k) + learning_rate(config, 100 - k) == pytest.approx(0.625, rel=1e-14)
    # At one and two thirds of the decay: cos(60 deg) = 1/2.
    assert learning_rate(config, 40) == pytest.approx(0.125 + 0.375 * 0.75, rel=1e-14)
    assert learning_rate(config, 70) == pytest.approx(0.125 + 0.375 * 0.25, rel=1e-14)


def test_cosine_decreases_at_every_step() -> None:
    rates = [learning_rate(make_config(name="cosine"), step) for step in range(10, 101)]
    assert all(a > b for a, b in zip(rates, rates[1:], strict=False))


def test_wsd_is_constant_then_decays_linearly() -> None:
    config = make_config(name="wsd", decay_fraction=0.2)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[10:81] == [0.5] * 71
    decrements = [a - b for a, b in zip(rates[80:], rates[81:], strict=False)]
    assert decrements == pytest.approx([0.375 / 20] * 19, rel=1e-12)
    assert rates[99] == pytest.approx(0.125 + 0.375 / 20, rel=1e-14)  # step 100 would have min_lr
    assert learning_rate(config, 100) == 0.125


@pytest.mark.parametrize(("name", "power"), [("linear", 1.0), ("polynomial", 1.0), ("polynomial", 2.5)])
def test_linear_and_polynomial_decays_equal_those_of_torch(name: str, power: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.375)  # decays to 0; the minimum of 0.125 comes on top
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=90, power=power)
    config = make_config(name=name, power=power)
    for step in range(10, 120):
        assert learning_rate(config, step) == pytest.approx(0.125 + optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_inverse_square_root_is_that_of_the_transformer() -> None:
    """Vaswani et al. (2017), section 5.3: min(n^-0.5, n w^-1.5) of step n, which has its peak w^-0.5 at n = w."""
    config = make_config(name="inverse_sqrt", min_lr=0.0)
    for n in range(1, 101):
        expected = 0.5 * 10**0.5 * min(n**-0.5, n * 10**-1.5)
        assert learning_rate(config, n - 1) == pytest.approx(expected, rel=1e-14)
    assert learning_rate(make_config(name="inverse_sqrt", warmup_steps=0, min_lr=0.0), 3) == 0.25
    assert learning_rate(make_config(name="inverse_sqrt"), 10**6) == 0.125, "not below min_lr"


def test_constant_schedule_is_constant() -> None:
    assert {learning_rate(make_config(name="constant"), step) for step in range(10, 200)} == {0.5}


def test_min_lr_auto_is_a_tenth_of_the_peak() -> None:
    assert learning_rate(make_config(min_lr="auto", name="cosine"), 100) == pytest.approx(0.05, rel=1e-15)


@pytest.mark.parametrize(("rule", "power"), [("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
@pytest.mark.parametrize(("batch", "base"), [(256, 64), (24, 32), (32, 32)])
def test_batch_scaling_multiplies_the_whole_schedule(rule: str, power: float, batch: int, base: int) -> None:
    factor = float(Fraction(batch, base)) ** power
    scaled = make_config(batch_scaling=rule, base_batch_size=base, name="cosine")
    scaled.train.global_batch_size = batch
    assert compute_peak_lr(scaled) == pytest.approx(0.5 * factor, rel=1e-15)
    for step in (0, 5, 10, 42, 99):
        unscaled = learning_rate(make_config(name="cosine"), step)
        assert math.isclose(learning_rate(scaled, step), factor * unscaled, rel_tol=1e-14)


def decay_by_halves(step: int) -> float:
    """Return a factor with the bits of 1 / 2**step."""
    return 0.5**step


def test_a_schedule_of_the_caller_gives_the_factor_of_the_peak() -> None:
    config = make_config(batch_scaling="linear", base_batch_size=16)
    assert [LearningRate(config, decay_by_halves)(step) for step in range(4)] == [1.0, 0.5, 0.25, 0.125]
    assert LearningRate(config)(42) == learning_rate(config, 42)


def test_a_schedule_of_the_caller_trains_as_the_same_built_in_one(pool: WarmPool) -> None:
    """Also when the run resumes under another layout."""
    words = ["train.deterministic=elastic", "train.micro_batch_size=2", "optimizer.lr=3e-3", "lr_scheduler.min_lr=0"]
    words.append("lr_scheduler.warmup_steps=0")
    built_in = make_small_config(None, *words, "lr_scheduler.name=linear")
    expected = get_step_metrics(pool.train(built_in)[0])
    config = make_small_config(None, *words, "lr_scheduler.name=constant", "cluster.workers=3")
    metrics = get_step_metrics(pool.train(config, lr_schedule=decline, steps_to=3)[0])
    config.parallel.zero = 3
    metrics += get_step_metrics(pool.train(config, lr_schedule=decline, resume_step=3)[0])
    for key in ("train/loss", "train/lr"):
        assert [step[key] for step in metrics] == [step[key] for step in expected]


def decline(step: int) -> float:
    """Return the factor of a linear decay to zero over five steps."""
    return 1 - step / 5


def test_a_run_takes_a_schedule(tmp_path: Path) -> None:
    config = make_small_config(tmp_path, "cluster.workers=0", "optimizer.lr=0.5")
    run = start(config, lr_schedule=decay_by_halves)
    assert run.result().steps == 5
    assert [step["train/lr"] for step in run.metrics()] == [0.5, 0.25, 0.125, 0.0625, 0.03125]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda step: -1, r"lr_schedule\(0\) = -1.0: return a finite factor of optimizer.lr, at least 0"),
        (lambda step: math.nan, r"lr_schedule\(0\) = nan: return a finite factor"),
        (lambda step: math.inf, r"lr_schedule\(0\) = inf: return a finite factor"),
        (lambda step: "fast", r"lr_schedule\(0\): ValueError: could not convert string to float: 'fast'"),
        (0.5, r"lr_schedule\(0\): TypeError: 'float' object is not callable"),
    ],
)
def test_a_schedule_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, schedule: Any, message: str
) -> None:
    with pytest.raises(CallbackError, match=message) as refused:
        train(make_small_config(tmp_path / "run", "cluster.workers=0"), lr_schedule=schedule, quiet=True)
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_wrong_factor_of_a_later_step_ends_the_run_there(tmp_path: Path) -> None:
    schedule: Callable[[int], float] = lambda step: 1.0 if step < 3 else -1.0  # noqa: E731
    with pytest.raises(CallbackError, match=r"lr_schedule\(3\) = -1.0"):
        train(make_small_config(tmp_path, "cluster.workers=0"), lr_schedule=schedule, quiet=True)
