"""The page's script, run by Node: it agrees with the Python charts, and handles axes, smoothing and hidden lines."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from raytrain_hpc.run_report.charts import WIDE_SIZE, Chart, Line, Mark, draw_svg
from raytrain_hpc.run_report.html_page import SCRIPTS
from raytrain_hpc.run_report.scale import compute_clip_limit, compute_ticks, format_number

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="the script is run by node")

VIEW = "{x: 'step', log: false, smoothing: 0, fullRange: false, ...changes, hidden: new Set(hidden)}"
RUNS = [{"name": "one", "axis": [[1, 100, 30], [11, 1100, 630]]}] * 2
MARKS = [Mark(4, "1", "rank 1 died"), Mark(9, "2", "rank 2 died"), Mark(9, "3", "rank 0 died")]
MARKS += [Mark(10, "4", "rank 0 died"), Mark(10, "1", "rank 1 died", 1, run=1)]
TRAINING = Line("training", [(step, 8.0 / step) for step in range(1, 12)])
VALIDATION = Line("validation", [(5, 2.0), (11, 1.0)], 1, is_sparse=True)
LOSS = Chart("Loss", "nats", [TRAINING, VALIDATION], MARKS, is_wide=True)


# Answers each line of its input, a program as JSON, with a line: the value of the program, or its error.
_SERVER = """
const vm = require("vm");
require("readline").createInterface({input: process.stdin}).on("line", (line) => {
  try { console.log(JSON.stringify({value: vm.runInThisContext(JSON.parse(line))})); }
  catch (error) { console.log(JSON.stringify({error: String(error.stack)})); }
});
"""


class Node:
    """A Node process that holds the page's script."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["node", "-e", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._run("".join(files("raytrain_hpc.run_report").joinpath(name).read_text() for name in SCRIPTS))

    def _run(self, program: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(program)}\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline())
        assert "error" not in reply, reply
        return reply.get("value")

    def evaluate(self, expression: str, **values: Any) -> Any:
        """Return the value of a JavaScript expression over `values` and the functions of the script."""
        names = "".join(f"const {name} = {json.dumps(value)};" for name, value in values.items())
        return self._run(f"(() => {{ {names} return {expression}; }})()")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    server = Node()
    yield server
    server.close()


def draw(node: Node, chart: Chart, width: int = WIDE_SIZE[0], **changes: Any) -> dict[str, Any]:
    """Return what the script draws: `svg` and `note`. `changes`: of the view. `hidden` is a list."""
    hidden = changes.pop("hidden", [])
    call = f"(({{svg, note}}) => ({{svg, note}}))(drawChart(chart, runs, {VIEW}, width))"
    result: dict[str, Any] = node.evaluate(
        call, chart=chart.to_json(), runs=RUNS, changes=changes, hidden=hidden, width=width
    )
    return result


def read_texts(svg: str, name: str) -> list[str]:
    return re.findall(rf'<text class="{name}[^>]*>([^<]*)<', svg)


def read_points(svg: str, name: str) -> list[list[tuple[float, float]]]:
    """Return the points of every shape that has the class `name`."""
    paths = re.findall(rf'class="{name}[^"]*" points="([^"]*)"', svg)
    return [[tuple(map(float, pair.split(","))) for pair in path.split()] for path in paths]  # type: ignore[misc]


def test_scales_agree_with_python(node: Node) -> None:
    ranges = [(0, 10, 5), (0.13, 0.87, 5), (-3, 12, 3), (1e6, 3e6, 4), (2e-6, 9e-6, 4), (7, 7, 5), (0, 0, 5)]
    series = [[40.0, *[1.0] * 60], [1.0] * 50, [3.0, 1.0], [float(x * x) for x in range(30)], [0.0] * 20]
    numbers = [0, 0.003, 12.5e6, 412_345, 1234.4, 2e-06, -7.25e12, 1e-5, 0.00012345, 99_999, 3.14159, 1e15]
    result = node.evaluate(
        "[ranges.map((r) => computeTicks(...r)), series.map((s) => computeClipLimit(s, 0)), numbers.map(formatNumber)]",
        ranges=ranges, series=series, numbers=numbers,
    )  # fmt: skip
    assert result[0] == [pytest.approx(compute_ticks(*values)) for values in ranges]
    assert result[1] == [pytest.approx(compute_clip_limit(values, 0)) for values in series]
    assert result[2] == [format_number(value) for value in numbers]


@pytest.mark.parametrize(
    "chart",
    [
        LOSS,
        Chart("time", "s", [Line("a", [(1, 50.0), *((x, 1.0) for x in range(2, 60))])], is_stacked=True, is_wide=True),
        Chart("Ranks", "ranks", [Line("a", [(1, 3.0), (9, 2.0)])], is_counted=True, is_wide=True),
    ],
    ids=["lines", "clipped stack", "counts"],
)
def test_first_drawing_is_that_of_python(node: Node, chart: Chart) -> None:
    drawn, (svg, note) = draw(node, chart), draw_svg(chart)
    for name in ("unit", "tick", "marklabel"):
        assert read_texts(drawn["svg"], name) == read_texts(svg, name)
    for name in ("line", "area"):
        pairs = zip(read_points(drawn["svg"], name), read_points(svg, name), strict=True)
        assert all([x for x, _ in ours] == [x for x, _ in theirs] for ours, theirs in pairs)
    assert drawn["svg"].count("<circle") == svg.count("<circle")
    assert drawn["svg"].count('class="clipped"') == svg.count('class="clipped"')
    assert drawn["note"] == note


def test_x_axis_by_tokens_and_by_time(node: Node) -> None:
    steps, tokens, time = (draw(node, LOSS, x=axis)["svg"] for axis in ("step", "tokens", "time"))
    assert "1000" in read_texts(tokens, "tick") and "tokens" in read_texts(tokens, "unit")
    assert read_texts(time, "unit")[1] == "time since the first step (min)" and "10" in read_texts(time, "tick")
    # A step is 100 tokens and takes 1 min, so that all points and marks stay where they are.
    assert read_points(steps, "line") == read_points(tokens, "line") == read_points(time, "line")
    assert re.findall('"mark alert" x1="([^"]*)"', steps) == re.findall('"mark alert" x1="([^"]*)"', time)


def test_logarithmic_axis(node: Node) -> None:
    chart = Chart("norm", "L2", [Line("a", [(1, 0.0), *((x, 10.0**-x) for x in range(2, 7))])])
    svg = draw(node, chart, log=True)["svg"]
    (points,) = read_points(svg, "line")
    assert len(points) == 5  # 0 has no logarithm
    gaps = [low[1] - high[1] for high, low in zip(points, points[1:], strict=False)]
    assert gaps == pytest.approx([gaps[0]] * 4, abs=0.2)
    assert {"0.01", "0.001", "0.0001", "1e-05"} <= set(read_texts(svg, "tick"))
    exact = Chart("lr", "lr", chart.lines, is_exact=True)
    assert draw(node, exact, log=True) == draw(node, exact)


def test_smoothing_is_a_weighted_mean_and_keeps_the_raw_line(node: Node) -> None:
    values = [4.0, 8.0, 6.0]
    smoothed = node.evaluate("smooth(points, 0.5)", points=list(enumerate(values, 1)))
    expected = [4, (4 / 2 + 8) / (1 / 2 + 1), (4 / 4 + 8 / 2 + 6) / (1 / 4 + 1 / 2 + 1)]
    assert [value for _, value in smoothed] == pytest.approx(expected)
    raw, smooth, validation = read_points(draw(node, LOSS, smoothing=0.8)["svg"], "line")
    (plain, plain_validation) = read_points(draw(node, LOSS)["svg"], "line")
    assert raw == plain and validation == plain_validation  # sparse points are never smoothed
    assert smooth[0] == plain[0] and all(s[1] < p[1] for s, p in zip(smooth[1:], plain[1:], strict=True))


def test_hidden_lines_leave_the_axes(node: Node) -> None:
    svg = draw(node, LOSS, hidden=["training"])["svg"]
    assert len(read_points(svg, "line")) == 1 and svg.count("<circle") == 2
    assert max(float(tick) for tick in read_texts(svg, "tick")[:5]) <= 2
    nothing = draw(node, LOSS, hidden=["training", "validation"])
    assert "no line is shown" in nothing["svg"] and not nothing["note"]


def test_outliers_are_shown_on_request(node: Node) -> None:
    chart = Chart("time", "s", [Line("a", [(1, 50.0), *((x, 1.0) for x in range(2, 60))])])
    assert draw(node, chart)["note"] == "▲ above the axis, up to 50 s"
    shown = draw(node, chart, fullRange=True)
    assert not shown["note"] and "50" in read_texts(shown["svg"], "tick")


def test_narrow_charts_have_fewer_ticks_and_keep_their_text_size(node: Node) -> None:
    svg = draw(node, LOSS, width=360)["svg"]
    assert 'width="360"' in svg and 'viewBox="0 0 360 240"' in svg
    assert len(read_texts(svg, "tick")) < len(read_texts(draw(node, LOSS, width=1100)["svg"], "tick"))


def test_pointer_names_the_closest_points_and_marks(node: Node) -> None:
    call = f"(() => {{ const d = drawChart(chart, runs, {VIEW}, 900); return describePointer(d, d.toX(4)); }})()"
    rows = node.evaluate(call, chart=LOSS.to_json(), runs=RUNS, changes={}, hidden=[])
    assert [row["text"] for row in rows] == ["training, step 4: 2", "validation, step 5: 2", "rank 1 died"]
    assert [row["color"] for row in rows] == ["c0", "c1", "alert"]


def test_time_axis_has_a_readable_unit(node: Node) -> None:
    spans = [30.0, 3600.0, 5 * 3600.0, 30 * 86400.0]
    assert node.evaluate("spans.map(chooseTimeUnit)", spans=spans) == [["s", 1], ["min", 60], ["h", 3600], ["d", 86400]]
    rows = [[1, 10, 0.0], [3, 30, 5.0], [4, 40, 9.0]]
    assert node.evaluate("[0, 2, 3.5, 9].map((x) => interpolate(rows, x, 2))", rows=rows) == [0, 2.5, 7, 9]
    assert node.evaluate("interpolate([[5, 50, 1]], 7, 1)") == 50
