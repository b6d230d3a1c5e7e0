"""Charts as SVG and as data for the script."""

from __future__ import annotations

import xml.etree.ElementTree as Xml

import pytest

from raytrain_hpc.run_report.charts import Chart, Line, Mark, draw_figure, draw_svg


def parse(chart: Chart) -> tuple[Xml.Element, str]:
    svg, note = draw_svg(chart)
    return Xml.fromstring(svg), note


def find(picture: Xml.Element, name: str) -> list[Xml.Element]:
    """Return the elements that have the class `name`."""
    return [element for element in picture.iter() if name in element.get("class", "").split()]


def read_points(shape: Xml.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in shape.get("points", "").split()]  # type: ignore[misc]


def test_chart_draws_every_point_in_its_place() -> None:
    line = Line("a & b", [(1, 5.0), (2, 3.0), (5, 1.0)])
    sparse = Line("validation", [(2, 4.0), (5, 2.0)], 1, is_sparse=True)
    marks = [Mark(2, "1", "rank 1 < died")]
    picture, note = parse(Chart("loss < 6", "nats", [line, sparse, Line("none", [])], marks, is_wide=True))
    dense_path, sparse_path = find(picture, "line")
    (x1, y1), (x2, y2), (x5, y5) = read_points(dense_path)
    assert (x2 - x1) * 3 == pytest.approx(x5 - x2, abs=0.3)  # at steps 1, 2 and 5
    assert (y2 - y1) == pytest.approx(y5 - y2, abs=0.2)  # of values 5, 3 and 1
    (vx2, vy4), (vx5, vy2) = read_points(sparse_path)
    assert (vx2, vx5) == (x2, x5) and vy4 == pytest.approx((y1 + y2) / 2, abs=0.1)  # on the same axes
    assert len(find(picture, "dot")) == 2 and "sparse" in sparse_path.get("class", "")
    (mark,), (label,) = find(picture, "mark"), find(picture, "marklabel")
    assert float(mark.get("x1", "")) == pytest.approx(x2, abs=0.1) and mark[0].text == "rank 1 < died"
    assert label.text == "1" and not note


def test_axes_are_labelled() -> None:
    picture, _ = parse(Chart("Throughput", "tokens/s", [Line("a", [(1, 10.0), (5, 50.0)])]))
    assert [text.text for text in find(picture, "unit")] == ["tokens/s", "step"]
    assert {"10", "20", "30", "40", "50"} <= {text.text for text in find(picture, "tick")}


def test_layers_of_a_stack_lie_on_each_other() -> None:
    layers = [Line("forward", [(1, 1.0), (2, 2.0)]), Line("backward", [(1, 3.0), (2, 2.0)], 3)]
    picture, _ = parse(Chart("time", "s", layers, is_stacked=True))
    forward, backward = (read_points(area) for area in find(picture, "area"))
    zero = forward[-1][1]
    assert {y for _, y in forward[2:]} == {zero}
    assert backward[2:] == forward[1::-1]  # the lower edge of one is the upper edge of the other
    heights = [zero - y for _, y in (forward[0], forward[1], backward[0], backward[1])]
    assert heights == pytest.approx([heights[0] * factor for factor in (1, 2, 4, 4)], abs=0.2)


def test_a_slow_first_step_does_not_flatten_the_others() -> None:
    layers = [Line("forward", [(1, 50.0), *((step, 1.0) for step in range(2, 61))])]
    picture, note = parse(Chart("time", "s per step", layers, is_stacked=True))
    (area,) = find(picture, "area")
    points = read_points(area)
    zero, top = points[-1][1], float(find(picture, "grid")[-1].get("y1", ""))
    assert zero - points[1][1] > 0.6 * (zero - top)  # an ordinary step fills most of the axis
    (sign,) = find(picture, "clipped")
    assert sign[0].text == "50" and note == "▲ above the axis, up to 50 s per step"


def test_the_start_of_a_loss_curve_is_never_clipped() -> None:
    points = [(1, 10.0), *((step, 2.0) for step in range(2, 400)), (400, 90.0)]
    _, note = parse(Chart("loss", "nats", [Line("a", points)], keeps_start=True))
    assert note == "▲ above the axis, up to 90 nats"
    picture, _ = parse(Chart("loss", "nats", [Line("a", points[:-1])], keeps_start=True))
    assert not find(picture, "clipped")


def test_close_marks_share_a_label_and_an_early_one_stands_at_the_edge() -> None:
    marks = [Mark(step, str(number), "died") for number, step in enumerate((0, 50, 50.5, 51, 90), 1)]
    marks.append(Mark(90.5, "1", "of another run", 1, run=1))
    chart = Chart("loss", "nats", [Line("a", [(1, 1.0), (100, 2.0)])], marks, is_wide=True)
    picture, _ = parse(chart)
    assert [label.text for label in find(picture, "marklabel")] == ["1", "2–4", "5, 1"]
    left = read_points(find(picture, "line")[0])[0][0]
    assert len(find(picture, "mark")) == 6 and float(find(picture, "mark")[0].get("x1", "")) == left


def test_counts_have_whole_ticks() -> None:
    picture, _ = parse(Chart("Ranks", "ranks", [Line("a", [(1, 3.0), (9, 2.0)])], is_counted=True))
    ticks = [tick for tick in find(picture, "tick") if tick.get("text-anchor") == "end"]
    assert [tick.text for tick in ticks] == ["2", "3"]


def test_chart_without_points_is_empty() -> None:
    chart = Chart("loss", "nats", [Line("a", [])])
    assert chart.is_empty and draw_svg(chart) == ("", "")


def test_lines_beyond_the_palette_are_dashed() -> None:
    lines = [Line(f"run {index}", [(1, 1.0), (2, 2.0)], index) for index in range(10)]
    picture, _ = parse(Chart("loss", "nats", lines))
    classes = [shape.get("class", "").split()[1:] for shape in find(picture, "line")]
    assert classes[0] == ["c0"] and classes[8] == ["c0", "dashed"] and len({tuple(name) for name in classes}) == 10


def test_legend_names_the_lines_of_a_figure() -> None:
    lines = [Line("<train>", [(1, 1.0)]), Line("validation", [(1, 2.0)], 1, is_sparse=True)]
    figure = draw_figure(Chart("Loss", "nats", lines), 3)
    assert 'data-chart="3"' in figure and "&lt;train&gt;</span>" in figure and "key c1 sparse" in figure
    assert 'class="key ' not in draw_figure(Chart("Loss", "nats", lines[:1]), 0)  # nothing to distinguish


def test_data_of_long_lines_is_reduced() -> None:
    points = [(step, 1 / 3 if step % 7 else 9.0) for step in range(1, 7001)]
    content = Chart("loss", "nats", [Line("a", points)]).to_json()["lines"][0]
    assert len(content["points"]) <= 1000 and max(value for _, value in content["points"]) == 9
    assert len(content["means"]) == 1000
    assert sum(value for _, value in content["means"]) / 1000 == pytest.approx(6 / 7 / 3 + 9 / 7, rel=1e-3)
    assert "means" not in Chart("loss", "nats", [Line("a", points[:1000])]).to_json()["lines"][0]
