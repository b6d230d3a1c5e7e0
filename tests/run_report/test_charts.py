"""Axes and lines, against arithmetic by hand."""

from __future__ import annotations

import math
import xml.etree.ElementTree as Xml

import pytest

from raytrain_hpc.run_report.charts import Line, Mark, compute_ticks, downsample, draw_line_chart, format_number


@pytest.mark.parametrize(
    "low, high, about, expected",
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.13, 0.87, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-3, 12, 3, [-5, 0, 5, 10, 15]),
        (1e6, 3e6, 4, [1e6, 1.5e6, 2e6, 2.5e6, 3e6]),
        (2e-6, 9e-6, 4, [2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
    ],
)
def test_ticks_are_round_and_reach_around(low: float, high: float, about: int, expected: list[float]) -> None:
    assert compute_ticks(low, high, about) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 7.0, -3.5])
def test_a_constant_has_an_axis_too(value: float) -> None:
    found = compute_ticks(value, value, 5)
    assert len(found) > 2 and found[0] < value < found[-1]


def test_thinning_keeps_what_can_be_seen() -> None:
    points = [(float(x), math.sin(x / 50)) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)  # a spike of one step
    points[8765] = (8765.0, -9.0)
    kept = downsample(points, 400)
    assert len(kept) <= 400 and set(kept) <= set(points) and kept == sorted(kept)
    assert {(4321.0, 9.0), (8765.0, -9.0), points[0], points[-1]} <= set(kept)
    assert downsample(points[:300], 400) == points[:300]


def test_numbers_are_short() -> None:
    shown = [format_number(x) for x in (0, 0.003, 12.5e6, 412_345, 1234.5, 2e-06, -7.25e12)]
    assert shown == ["0", "0.003", "12.5M", "412.3k", "1234", "2e-06", "-7.25T"]


def test_a_chart_is_a_picture_with_every_point_in_its_place() -> None:
    line = Line("a & b", [(1, 5.0), (2, 3.0), (5, 1.0)], "#123456")
    other = Line("validation", [(5, 2.0)], "#654321", has_markers=True)
    text = draw_line_chart("loss < 6", [line, other, Line("none", [], "#000")], [Mark(2, "died: rank 1", "red")])
    picture = Xml.fromstring(text)
    drawn = [shape.get("points") for shape in picture.iter("polyline")]
    places = [tuple(map(float, place.split(","))) for place in drawn[0].split()]
    across, down = [x for x, _ in places], [y for _, y in places]
    assert (across[1] - across[0]) * 3 == pytest.approx(across[2] - across[1], abs=0.3)  # steps 1, 2 and 5
    assert (down[1] - down[0]) == pytest.approx(down[2] - down[1], abs=0.2)  # 5, 3 and 1
    assert len(list(picture.iter("circle"))) == 1
    marks = [shape for shape in picture.iter("line") if shape.get("class") == "mark"]
    assert float(marks[0].get("x1")) == pytest.approx(across[1], abs=0.1) and marks[0][0].text == "died: rank 1"


def test_no_point_no_chart() -> None:
    assert draw_line_chart("loss", [Line("a", [], "red")]) == ""
