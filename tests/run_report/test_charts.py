"""Ticks, downsampling and SVG of charts, compared with values computed by hand."""

from __future__ import annotations

import math
import xml.etree.ElementTree as Xml

import pytest

from raytrain_hpc.run_report.charts import Line, Mark, compute_ticks, downsample, draw_line_chart, format_number


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


def test_downsampling_keeps_extremes_and_ends() -> None:
    points = [(float(x), math.sin(x / 50)) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)  # a spike of one step
    points[8765] = (8765.0, -9.0)
    selected = downsample(points, 400)
    assert len(selected) <= 400 and set(selected) <= set(points) and selected == sorted(selected)
    assert {(4321.0, 9.0), (8765.0, -9.0), points[0], points[-1]} <= set(selected)
    assert downsample(points[:300], 400) == points[:300]


def test_numbers_have_units_and_four_digits() -> None:
    texts = [format_number(x) for x in (0, 0.003, 12.5e6, 412_345, 1234.5, 2e-06, -7.25e12)]
    assert texts == ["0", "0.003", "12.5M", "412.3k", "1234", "2e-06", "-7.25T"]


def test_chart_draws_every_point_in_its_place() -> None:
    line = Line("a & b", [(1, 5.0), (2, 3.0), (5, 1.0)], "#123456")
    markers = Line("validation", [(5, 2.0)], "#654321", has_markers=True)
    text = draw_line_chart("loss < 6", [line, markers, Line("none", [], "#000")], [Mark(2, "died: rank 1", "red")])
    picture = Xml.fromstring(text)
    polylines = [shape.get("points") for shape in picture.iter("polyline")]
    coordinates = [tuple(map(float, pair.split(","))) for pair in polylines[0].split()]
    xs, ys = [x for x, _ in coordinates], [y for _, y in coordinates]
    assert (xs[1] - xs[0]) * 3 == pytest.approx(xs[2] - xs[1], abs=0.3)  # at steps 1, 2 and 5
    assert (ys[1] - ys[0]) == pytest.approx(ys[2] - ys[1], abs=0.2)  # of values 5, 3 and 1
    assert len(list(picture.iter("circle"))) == 1
    marks = [shape for shape in picture.iter("line") if shape.get("class") == "mark"]
    assert float(marks[0].get("x1")) == pytest.approx(xs[1], abs=0.1) and marks[0][0].text == "died: rank 1"


def test_chart_without_points_is_empty() -> None:
    assert draw_line_chart("loss", [Line("a", [], "red")]) == ""
