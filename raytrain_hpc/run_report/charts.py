"""Line charts over steps as SVG, with round tick values, event marks and data for a hover script."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 26, 30
_MAX_POINTS = 400  # per line; more cannot be distinguished


@dataclass(frozen=True)
class Line:
    """A series of points (step, value) in step order. `has_markers`: draw each point, for sparse series."""

    name: str
    points: Sequence[Point]
    color: str
    has_markers: bool = False


@dataclass(frozen=True)
class Mark:
    """An event at a step, drawn as a vertical line."""

    step: float
    text: str
    color: str


def draw_line_chart(title: str, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> str:
    """Return an SVG chart of the lines over one pair of axes; empty if no line has a point."""
    shown = [
        Line(line.name, downsample(line.points, _MAX_POINTS), line.color, line.has_markers)
        for line in lines
        if line.points
    ]
    if not shown:
        return ""
    xs = [x for line in shown for x, _ in line.points]
    ys = [y for line in shown for _, y in line.points]
    x_ticks, y_ticks = compute_ticks(min(xs), max(xs), 6), compute_ticks(min(ys), max(ys), 5)
    x_scale = _Scale(min(xs), max(max(xs), min(xs) + 1e-9), _LEFT, WIDTH - _RIGHT)
    y_scale = _Scale(min(*ys, y_ticks[0]), max(*ys, y_ticks[-1]), HEIGHT - _BOTTOM, _TOP)
    data = [{"name": line.name, "color": line.color, "points": line.points} for line in shown]
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-lines=\'{escape(json.dumps(data), quote=True)}\' data-left="{_LEFT}" data-right="{WIDTH - _RIGHT}" '
        f'data-low="{x_scale.low}" data-high="{x_scale.high}">',
        f'<text class="title" x="{_LEFT}" y="15">{escape(title)}</text>',
    ]
    for tick in y_ticks:
        y = y_scale(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_number(tick)}</text>'
        )
    for tick in x_ticks:
        if x_scale.low <= tick <= x_scale.high:
            x = x_scale(tick)
            text = f'x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{format_number(tick)}</text>'
            parts.append(f'<text class="tick" {text}')
    for mark in marks:
        if x_scale.low <= mark.step <= x_scale.high:
            x, y_range = x_scale(mark.step), f'y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"'
            attributes = f'class="mark" x1="{x:.1f}" x2="{x:.1f}" {y_range} stroke="{mark.color}"'
            parts.append(f"<line {attributes}><title>{escape(mark.text)}</title></line>")
    parts += [_draw_line(line, x_scale, y_scale) for line in shown]
    return "".join([*parts, "</svg>"])


def _draw_line(line: Line, x_scale: _Scale, y_scale: _Scale) -> str:
    coordinates = [(x_scale(x), y_scale(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in coordinates)
    svg = f'<polyline fill="none" stroke="{line.color}" stroke-width="1.6" points="{path}"/>'
    if line.has_markers or len(coordinates) == 1:
        svg += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.color}"/>' for x, y in coordinates)
    return svg


@dataclass(frozen=True)
class _Scale:
    """Linear map from values [low, high] to SVG coordinates [start, stop]."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.stop - self.start) * ((value - self.low) / span if span else 0.5)


def downsample(points: Sequence[Point], max_points: int) -> list[Point]:
    """Reduce a line to at most `max_points` points: the lowest and highest of each group of neighbors, and the ends."""
    if len(points) <= max_points:
        return list(points)
    size = math.ceil(2 * len(points) / (max_points - 2))
    selected = [points[0]]
    for start in range(0, len(points), size):
        indices = range(start, min(start + size, len(points)))
        low, high = min(indices, key=lambda i: points[i][1]), max(indices, key=lambda i: points[i][1])
        selected += [points[i] for i in sorted({low, high})]
    return [*selected, points[-1]]


def compute_ticks(low: float, high: float, target_count: int) -> list[float]:
    """Return round numbers that cover [low, high]. Their distance is 1, 2 or 5 times a power of ten."""
    if high <= low:
        margin = abs(low) / 2 or 0.5
        low, high = low - margin, high + margin
    min_step = (high - low) / target_count
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= min_step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def format_number(value: float) -> str:
    """Format a number with at most 4 significant digits and a unit suffix: 12.5M, 0.003, 2e-06."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if suffix != 'k' else 1e3):.4g}{suffix}"
    return f"{value:.4g}"
