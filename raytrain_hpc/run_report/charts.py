"""Lines over steps as SVG: axes with round numbers, marks, and the points that a script shows under the pointer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 26, 30
_MAX_POINTS = 400  # of a line: more than that cannot be told apart


@dataclass(frozen=True)
class Line:
    """A series of points (step, value), in order. `dots`: far apart, and shown one by one."""

    name: str
    points: Sequence[Point]
    color: str
    has_markers: bool = False


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: float
    text: str
    color: str


def draw_line_chart(title: str, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> str:
    """An SVG picture of these lines over one pair of axes; empty where no line has a point."""
    shown = [
        Line(one.name, downsample(one.points, _MAX_POINTS), one.color, one.has_markers) for one in lines if one.points
    ]
    if not shown:
        return ""
    xs = [x for one in shown for x, _ in one.points]
    ys = [y for one in shown for _, y in one.points]
    x_ticks, y_ticks = compute_ticks(min(xs), max(xs), 6), compute_ticks(min(ys), max(ys), 5)
    across = _Scale(min(xs), max(max(xs), min(xs) + 1e-9), _LEFT, WIDTH - _RIGHT)
    up = _Scale(min(*ys, y_ticks[0]), max(*ys, y_ticks[-1]), HEIGHT - _BOTTOM, _TOP)
    data = [{"name": one.name, "colour": one.color, "points": one.points} for one in shown]
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-lines=\'{escape(json.dumps(data), quote=True)}\' data-left="{_LEFT}" data-right="{WIDTH - _RIGHT}" '
        f'data-low="{across.low}" data-high="{across.high}">',
        f'<text class="title" x="{_LEFT}" y="15">{escape(title)}</text>',
    ]
    for tick in y_ticks:
        y = up(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_number(tick)}</text>'
        )
    for tick in x_ticks:
        if across.low <= tick <= across.high:
            x = across(tick)
            text = f'x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{format_number(tick)}</text>'
            parts.append(f'<text class="tick" {text}')
    for mark in marks:
        if across.low <= mark.step <= across.high:
            x, where = across(mark.step), f'y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"'
            dashed = f'class="mark" x1="{x:.1f}" x2="{x:.1f}" {where} stroke="{mark.color}"'
            parts.append(f"<line {dashed}><title>{escape(mark.text)}</title></line>")
    parts += [_draw_line(one, across, up) for one in shown]
    return "".join([*parts, "</svg>"])


def _draw_line(line: Line, x_scale: _Scale, y_scale: _Scale) -> str:
    places = [(x_scale(x), y_scale(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline fill="none" stroke="{line.color}" stroke-width="1.6" points="{path}"/>'
    if line.has_markers or len(places) == 1:
        drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.color}"/>' for x, y in places)
    return drawn


@dataclass(frozen=True)
class _Scale:
    """Values [low, high] onto [start, stop] of the picture."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.stop - self.start) * ((value - self.low) / span if span else 0.5)


def downsample(points: Sequence[Point], max_points: int) -> list[Point]:
    """At most so many points that show the same line: of each run of neighbours the lowest and the highest."""
    if len(points) <= max_points:
        return list(points)
    size = math.ceil(2 * len(points) / (max_points - 2))
    kept = [points[0]]
    for first in range(0, len(points), size):
        some = range(first, min(first + size, len(points)))
        low, high = min(some, key=lambda i: points[i][1]), max(some, key=lambda i: points[i][1])
        kept += [points[i] for i in sorted({low, high})]
    return [*kept, points[-1]]


def compute_ticks(low: float, high: float, target_count: int) -> list[float]:
    """Round numbers over [low, high], from just below to just above; 1, 2 or 5 times a power of ten apart."""
    if high <= low:
        around = abs(low) / 2 or 0.5
        low, high = low - around, high + around
    rough = (high - low) / target_count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def format_number(value: float) -> str:
    """As short as it can be read: 12.5M, 0.003, 2e-06."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (limit if suffix != 'k' else 1e3):.4g}{suffix}"
    return f"{value:.4g}"
