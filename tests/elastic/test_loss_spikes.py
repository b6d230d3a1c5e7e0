"""Which loss is out of the ordinary."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from raytrain_hpc.elastic.loss_spikes import WINDOW, compute_spike_threshold


def test_deviations_above_the_mean_as_numpy_counts_them() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.2, WINDOW)
    assert compute_spike_threshold(losses.tolist(), 6.0) == pytest.approx(losses.mean() + 6 * losses.std(), rel=1e-12)


def test_nothing_is_said_of_few_or_of_none_that_count() -> None:
    assert compute_spike_threshold([3.0] * 31 + [nan, inf], 6.0) == inf
    assert compute_spike_threshold([3.0] * 32, 0.0) == inf


def test_a_curve_that_does_not_move_has_room() -> None:
    assert compute_spike_threshold([2.0] * 32, 5.0) == pytest.approx(2.01)
