"""Learning-rate schedules compared with independently written closed forms."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.optim.lr_scheduler import compute_peak_lr, learning_rate


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
