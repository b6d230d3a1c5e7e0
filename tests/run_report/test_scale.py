"""Ticks, axis limits, shortened series and number formats, compared with values computed by hand."""

from __future__ import annotations

import math

import pytest

from raytrain_hpc.run_report.scale import (
    Scale,
    compute_clip_limit,
    compute_group_means,
    compute_ticks,
    downsample,
    format_number,
)


@pytest.mark.parametrize(
    "low, high, target_count, expected",
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.13, 0.87, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3, 12, 3, [-5, 0, 5, 10, 15]),
        (1e6, 3e6, 4, [1e6, 1.5e6, 2e6, 2.5e6, 3e6]),
        (2e-6, 9e-6, 4, [2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, target_count: int, expected: list[float]) -> None:
    assert compute_ticks(low, high, target_count) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 7.0, -3.5])
def test_constant_line_has_an_axis(value: float) -> None:
    result = compute_ticks(value, value, 5)
    assert len(result) > 2 and result[0] < value < result[-1]


def test_scale_is_linear_and_centers_a_constant() -> None:
    assert [Scale(2, 6, 100, 0)(value) for value in (2, 3, 6)] == [100, 75, 0]
    assert Scale(2, 2, 100, 0)(2) == 50


def test_one_slow_step_is_clipped() -> None:
    assert compute_clip_limit([40.0, *[1.0] * 60], 0) == pytest.approx(1.5)
    assert compute_clip_limit([40.0, *[1.0] * 60], 30) == 30
    assert compute_clip_limit([40.0, *[1.0] * 60], 50) is None  # the value that must be shown is above it


@pytest.mark.parametrize("values", [[1.0] * 50, [40.0, 1.0, 1.0], [0.0] * 50, [10 / step for step in range(1, 9)]])
def test_values_without_outliers_are_not_clipped(values: list[float]) -> None:
    assert compute_clip_limit(values, 0) is None


def test_downsampling_keeps_extremes_and_ends() -> None:
    points = [(float(x), math.sin(x / 50)) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)  # a spike of one step
    points[8765] = (8765.0, -9.0)
    selected = downsample(points, 400)
    assert len(selected) <= 400 and set(selected) <= set(points) and selected == sorted(selected)
    assert {(4321.0, 9.0), (8765.0, -9.0), points[0], points[-1]} <= set(selected)
    assert downsample(points[:300], 400) == points[:300]


def test_group_means_are_means_at_the_end_of_each_group() -> None:
    points = [(float(x), float(x)) for x in range(1, 8)]
    assert compute_group_means(points, 3) == [(3, 2), (6, 5), (7, 7)]
    assert compute_group_means(points, 7) == points


def test_numbers_have_units_and_four_digits() -> None:
    texts = [format_number(x) for x in (0, 0.003, 12.5e6, 412_345, 1234.5, 2e-06, -7.25e12)]
    assert texts == ["0", "0.003", "12.5M", "412.3k", "1234", "2e-06", "-7.25T"]
