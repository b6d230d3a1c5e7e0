"""Charts over steps as SVG. The page's script draws the same charts again for other axes, sizes and smoothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from raytrain_hpc.run_report.scale import (
    Point,
    Scale,
    compute_clip_limit,
    compute_group_means,
    compute_ticks,
    downsample,
    format_number,
)

NUM_COLORS = 8  # of the palette in style.css
SIZE, WIDE_SIZE = (560, 260), (900, 300)
_LEFT, _RIGHT, _TOP, _MARK_LABEL, _BOTTOM = 54, 14, 26, 12, 40  # margins around the plot
_MAX_POINTS = 1000  # per line
MAX_STACKED_POINTS = 120
_MIN_LABEL_DISTANCE, _MIN_SIGN_DISTANCE, _DOT = 16, 9, 5
_START_MARGIN = 1.05  # above the first value of a line that is never clipped


@dataclass(frozen=True)
class Line:
    """A series of points (step, value) in step order.

    `color`: index in the palette; beyond its end, colors repeat with dashed lines. `is_sparse`: draw each point and
    never smooth the line. `run`: index of the run, by which the script finds tokens and time of a step.
    """

    name: str
    points: Sequence[Point]
    color: int = 0
    is_sparse: bool = False
    run: int = 0


@dataclass(frozen=True)
class Mark:
    """An event after a step, drawn as a vertical line with a short label. `color` None: the color of alerts."""

    step: float
    label: str
    text: str
    color: int | None = None
    run: int = 0


@dataclass(frozen=True)
class Chart:
    """A chart over steps. `unit` labels the y axis. `is_stacked`: lines are layers of a sum, and the axis starts at 0.

    `keeps_start`: the first value of each line is always inside the axis, even if it is an outlier. `is_exact`: never
    smoothed nor logarithmic. `is_counted`: exact whole numbers, and so are the ticks.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    is_stacked: bool = False
    keeps_start: bool = False
    is_exact: bool = False
    is_counted: bool = False
    is_wide: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no line has a point."""
        return not any(line.points for line in self.lines)

    @property
    def has_mark_labels(self) -> bool:
        """Whether marks have labels: small charts have no room for them."""
        return self.is_wide and bool(self.marks)

    def to_json(self) -> dict[str, Any]:
        """Return what the script needs to draw the chart: long lines reduced, numbers to 6 digits."""
        lines = []
        for line in self.lines:
            if not line.points:
                continue
            content: dict[str, Any] = {"name": line.name, "run": line.run, "color": line.color}
            content |= {"sparse": line.is_sparse, "points": round_points(self.reduce(line.points))}
            if len(line.points) > _MAX_POINTS and not self.is_stacked:  # a mean of extremes would be biased
                content["means"] = round_points(compute_group_means(line.points, _MAX_POINTS))
            lines.append(content)
        marks = [{**mark.__dict__} for mark in self.marks]
        options = {"stacked": self.is_stacked, "keepsStart": self.keeps_start, "wide": self.is_wide}
        options |= {"exact": self.is_exact or self.is_counted, "counted": self.is_counted}
        return {"title": self.title, "unit": self.unit, "lines": lines, "marks": marks} | options

    def reduce(self, points: Sequence[Point]) -> list[Point]:
        """Return the points to draw. Layers of a stack are reduced to means, at the same steps for every layer."""
        return compute_group_means(points, MAX_STACKED_POINTS) if self.is_stacked else downsample(points, _MAX_POINTS)


def round_points(points: Sequence[Point]) -> list[Point]:
    """Return the points with values of 6 significant digits."""
    return [(x, float(f"{value:.6g}")) for x, value in points]


def draw_figure(chart: Chart, index: int) -> str:
    """Return the HTML figure of chart number `index`: title, legend, SVG and a note on clipped values."""
    svg, note = draw_svg(chart)
    keys = ""
    if len([line for line in chart.lines if line.points]) > 1:
        names = ((line.name, line) for line in chart.lines if line.points)
        keys = "".join(
            f'<span class="key {_get_color_class(line.color)}{" sparse" if line.is_sparse else ""}">'
            f"<i></i>{escape(name)}</span>"
            for name, line in names
        )
    kinds = {"wide": chart.is_wide, "stacked": chart.is_stacked, "compared": _is_compared(chart)}
    classes = " ".join(["chart", *(name for name, applies in kinds.items() if applies)])
    return (
        f'<figure class="{classes}" data-chart="{index}"><figcaption><b>{escape(chart.title)}</b>'
        f'<span class="keys">{keys}</span></figcaption><div class="plot">{svg}</div>'
        f'<p class="note">{note}</p></figure>'
    )


def _is_compared(chart: Chart) -> bool:
    """Return whether dense and sparse lines share a color, so that the dense ones have to be fainter."""
    sparse_colors = {line.color for line in chart.lines if line.is_sparse}
    return any(line.color in sparse_colors for line in chart.lines if not line.is_sparse)


def draw_svg(chart: Chart) -> tuple[str, str]:
    """Return the chart as SVG, and a note on values that do not fit the axis, which is empty if all do."""
    lines = [(line, chart.reduce(line.points)) for line in chart.lines if line.points]
    if not lines:
        return "", ""
    width, height = WIDE_SIZE if chart.is_wide else SIZE
    tops = [points for _, points in lines]
    bases: list[list[Point]] = [[] for _ in lines]
    if chart.is_stacked:
        tops = stack_points(tops)
        bases = [[(x, 0.0) for x, _ in tops[0]], *tops[:-1]]
    top, bottom = _TOP + (_MARK_LABEL if chart.has_mark_labels else 0), height - _BOTTOM
    drawn = tops[-1:] if chart.is_stacked else tops
    values, xs = [y for points in drawn for _, y in points], [x for points in tops for x, _ in points]
    start = _START_MARGIN * max(points[0][1] for points in tops) if chart.keeps_start else 0.0
    limit = compute_clip_limit(values, start)
    high, low = (max(values) if limit is None else limit), 0.0 if chart.is_stacked else min(values)
    y_ticks = [tick for tick in compute_ticks(low, high, 5) if not chart.is_counted or tick == int(tick)]
    if limit is not None:  # keep the limit: a round number above it would flatten the line again
        y_ticks = [tick for tick in y_ticks if tick <= limit]
    x_scale = Scale(min(xs), max(max(xs), min(xs) + 1e-9), _LEFT, width - _RIGHT)
    y_scale = Scale(min(low, y_ticks[0]), max(high, y_ticks[-1]), bottom, top)
    # Only the upper edge clips lines: dots at the other edges are shown in full.
    box = (_LEFT - _DOT, top, width - _LEFT - _RIGHT + 2 * _DOT, bottom - top + _DOT)
    plot = 'x="{}" y="{}" width="{}" height="{}" viewBox="{} {} {} {}"'.format(*box, *box)
    layers = zip(lines, tops, bases, strict=True)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}, {escape(chart.unit)}">',
        *_draw_axes(chart.unit, x_scale, y_scale, y_ticks, height),
        f"<svg {plot}>",
        *(_draw_line(line, points, base, x_scale, y_scale) for (line, _), points, base in layers),
        "</svg>",
        *_draw_marks(chart, x_scale, top, bottom),
    ]
    above = [] if limit is None else sorted(point for points in drawn for point in points if point[1] > limit)
    parts += _draw_clip_signs(above, x_scale, top)
    note = describe_clipped([value for _, value in above], chart.unit)
    return "".join([*parts, "</svg>"]), note


def stack_points(layers: Sequence[Sequence[Point]]) -> list[list[Point]]:
    """Return the upper edge of each layer: the sum of it and the layers below."""
    edges: list[list[Point]] = []
    for layer in layers:
        below = [y for _, y in edges[-1]] if edges else [0.0] * len(layer)
        edges.append([(x, y + base) for (x, y), base in zip(layer, below, strict=True)])
    return edges


def describe_clipped(values: Sequence[float], unit: str) -> str:
    """Return a note on the values above the axis; empty without any."""
    return f"▲ above the axis, up to {format_number(max(values))} {unit}" if values else ""


def _get_color_class(color: int) -> str:
    return f"c{color % NUM_COLORS}" + (" dashed" if color >= NUM_COLORS else "")


def _draw_axes(unit: str, x_scale: Scale, y_scale: Scale, y_ticks: Sequence[float], height: int) -> Iterator[str]:
    left, right, bottom = x_scale.start, x_scale.stop, y_scale.start
    yield f'<text class="unit" x="4" y="12">{escape(unit)}</text>'
    yield f'<text class="unit" x="{(left + right) / 2}" y="{height - 5}" text-anchor="middle">step</text>'
    for tick in y_ticks:
        y = y_scale(tick)
        yield f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{format_number(tick)}</text>'
    for tick in compute_ticks(x_scale.low, x_scale.high, 6 if right < SIZE[0] else 10):
        if x_scale.low <= tick <= x_scale.high:
            position = f'x="{x_scale(tick):.1f}" y="{bottom + 16}"'
            yield f'<text class="tick" {position} text-anchor="middle">{format_number(tick)}</text>'


def _draw_line(line: Line, points: Sequence[Point], base: Sequence[Point], x_scale: Scale, y_scale: Scale) -> str:
    """Return a line, with a sign on each point if it is sparse, or the area between the points and `base`."""
    color = _get_color_class(line.color)
    path = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in points)
    if base:
        back = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in reversed(base))
        return f'<polygon class="area {color}" points="{path} {back}"/>'
    sparse = " sparse" if line.is_sparse else ""
    svg = f'<polyline class="line {color}{sparse}" points="{path}"/>'
    if line.is_sparse or len(points) == 1:
        svg += "".join(
            f'<circle class="dot {color}" cx="{x_scale(x):.1f}" cy="{y_scale(y):.1f}" r="3.5"/>' for x, y in points
        )
    return svg


def _draw_marks(chart: Chart, x_scale: Scale, top: int, bottom: int) -> Iterator[str]:
    """Yield the vertical lines of the marks, and their labels; close ones share a label."""
    marks = [replace(mark, step=max(mark.step, x_scale.low)) for mark in chart.marks]  # 0: before the first step
    groups: list[list[Mark]] = []
    for mark in sorted((mark for mark in marks if mark.step <= x_scale.high), key=lambda mark: mark.step):
        x, color = x_scale(mark.step), "alert" if mark.color is None else _get_color_class(mark.color)
        yield (
            f'<line class="mark {color}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}">'
            f"<title>{escape(mark.text)}</title></line>"
        )
        if groups and x - x_scale(groups[-1][0].step) < _MIN_LABEL_DISTANCE:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    for group in groups if chart.has_mark_labels else []:
        color = "alert" if group[0].color is None else _get_color_class(group[0].color)
        position = f'x="{x_scale(group[0].step):.1f}" y="{top - 4}"'
        yield f'<text class="marklabel {color}" {position} text-anchor="middle">{escape(_join_labels(group))}</text>'


def _join_labels(marks: Sequence[Mark]) -> str:
    """Return one label for marks that are close: a range for marks of one run, else a list."""
    if len({mark.run for mark in marks}) > 1:
        return ", ".join(mark.label for mark in marks)
    return marks[0].label if len(marks) == 1 else f"{marks[0].label}–{marks[-1].label}"


def _draw_clip_signs(points: Sequence[Point], x_scale: Scale, top: int) -> Iterator[str]:
    """Yield a triangle at the upper end of the axis for each value above it; close ones share a triangle."""
    previous_x = float("-inf")
    for step, value in points:
        x = x_scale(step)
        if x - previous_x >= _MIN_SIGN_DISTANCE:
            previous_x = x
            path = f"M{x - 5:.1f},{top + 8} L{x + 5:.1f},{top + 8} L{x:.1f},{top} Z"
            yield f'<path class="clipped" d="{path}"><title>{format_number(value)}</title></path>'
