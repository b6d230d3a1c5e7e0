"""Loss spikes: the threshold above which a loss is an outlier."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from raytrain_hpc.elastic.loss_spikes import WINDOW, compute_spike_threshold


def test_the_threshold_is_deviations_above_the_mean() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.2, WINDOW)
    assert compute_spike_threshold(losses.tolist(), 6.0) == pytest.approx(losses.mean() + 6 * losses.std(), rel=1e-12)


def test_too_few_finite_losses_give_no_threshold() -> None:
    assert compute_spike_threshold([3.0] * 31 + [nan, inf], 6.0) == inf
    assert compute_spike_threshold([3.0] * 32, 0.0) == inf


def test_a_flat_loss_curve_keeps_a_margin() -> None:
    assert compute_spike_threshold([2.0] * 32, 5.0) == pytest.approx(2.01)
