"""Figures of one run: placement of ranks, memory by kind, and step time by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from raytrain_hpc.run_report.charts import format_number
from raytrain_hpc.run_report.run_reader import RunRecord

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
STEP_PHASE_COLORS = {
    "data": COLORS[6],
    "forward": COLORS[0],
    "backward": COLORS[3],
    "communication": COLORS[1],
    "optimizer": COLORS[2],
    "checkpoint": COLORS[5],
    "rest": COLORS[7],
}
_MEMORY_KIND_COLORS = {"weights": COLORS[0], "gradients": COLORS[3], "moments": COLORS[2], "copies": COLORS[5]}
_MEMORY_KIND_COLORS |= {"activations": COLORS[1], "working": COLORS[4], "rest": COLORS[7]}
_MAX_BARS = 80
_WIDTH, _LEFT = 1140, 90
GIB = 2**30


def draw_placement(workers: Sequence[Mapping[str, Any]]) -> str:
    """Return one HTML box per node with its ranks. Ranks of the same pipeline coordinate have the same color."""
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for worker in sorted(workers, key=lambda worker: int(worker["rank"])):
        nodes.setdefault(str(worker["node"]), []).append(worker)
    boxes = []
    for node, ranks in nodes.items():
        cells = "".join(_draw_rank(worker) for worker in ranks)
        host = escape(str(ranks[0].get("host", "")))
        boxes.append(f'<div class="node"><h4>{host} <small>{escape(node[:12])}</small></h4>{cells}</div>')
    return f'<div class="nodes">{"".join(boxes)}</div>'


def _draw_rank(worker: Mapping[str, Any]) -> str:
    coordinates = worker.get("coordinates", {})
    position = " ".join(f"{axis}{index}" for axis, index in coordinates.items() if index or axis in ("pp", "tp"))
    color = COLORS[int(coordinates.get("pp", 0)) % len(COLORS)]
    title = f"rank {worker['rank']}, pid {worker.get('pid')}, {worker.get('device')}: {position}"
    label = f"<b>{worker['rank']}</b><small>{escape(position)}</small>"
    return f'<span class="rank" style="border-color:{color}" title="{escape(title)}">{label}</span>'


def draw_memory(run: RunRecord) -> str:
    """Return stacked bars of a rank's memory by kind: as planned, and as measured on rank 0. Empty without a plan."""
    planned = run.plan.get("memory")
    if not planned:
        return ""
    metrics = run.last_metrics
    kinds = ("weights", "gradients", "moments")
    measured = {kind: metrics[f"memory/{kind}_gib"] * GIB for kind in kinds if f"memory/{kind}_gib" in metrics}
    peak = max((value for _, value in run.get_points("memory/peak_gib")), default=0.0) * GIB
    measured["rest"] = max(0.0, peak - sum(measured.values()))
    bars = [("planned", {kind: planned.get(kind, 0) for kind in _MEMORY_KIND_COLORS}), ("measured", measured)]
    max_total = max(sum(bar.values()) for _, bar in bars) or 1.0
    rows = [_draw_stacked_bar(name, bar, max_total, 30 * row) for row, (name, bar) in enumerate(bars)]
    return f'<svg viewBox="0 0 {_WIDTH} 64" class="bars">{"".join(rows)}</svg>{_draw_legend(_MEMORY_KIND_COLORS)}'


def _draw_stacked_bar(name: str, bar: Mapping[str, float], max_total: float, y: float) -> str:
    parts = [f'<text class="tick" x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">{name}</text>']
    x = float(_LEFT)
    for kind, size in bar.items():
        width = (_WIDTH - _LEFT - 110) * size / max_total
        title = f"{kind}: {size / GIB:.3f} GiB"
        attributes = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{_MEMORY_KIND_COLORS[kind]}"'
        parts.append(f"<rect {attributes}><title>{title}</title></rect>")
        x += width
    parts.append(f'<text class="tick" x="{x + 6:.1f}" y="{y + 17}">{sum(bar.values()) / GIB:.3f} GiB</text>')
    return "".join(parts)


def draw_step_time(run: RunRecord) -> str:
    """Return stacked bars of the mean step time by phase, one bar per group of consecutive steps."""
    lines = [line for line in run.metrics if "time/forward_s" in line]
    if not lines:
        return ""
    size = -(-len(lines) // _MAX_BARS)
    groups = [lines[first : first + size] for first in range(0, len(lines), size)]
    bars = [compute_mean_phases(group) for group in groups]
    max_seconds = max(sum(bar.values()) for bar in bars) or 1.0
    width, height = (_WIDTH - _LEFT) / len(bars), 170.0
    parts = []
    for index, (group, bar) in enumerate(zip(groups, bars, strict=True)):
        y = height + 10
        for phase, seconds in bar.items():
            bar_height = height * seconds / max_seconds
            y -= bar_height
            title = f"steps {group[0]['step']} to {group[-1]['step']}: {phase} {1000 * seconds:.2f} ms"
            attributes = (
                f'x="{_LEFT + index * width:.1f}" y="{y:.1f}" width="{max(0.5, width - 0.6):.1f}" '
                f'height="{bar_height:.1f}"'
            )
            parts.append(f'<rect {attributes} fill="{STEP_PHASE_COLORS[phase]}"><title>{title}</title></rect>')
    parts.append(
        f'<text class="tick" x="{_LEFT - 8}" y="20" text-anchor="end">{format_number(1000 * max_seconds)} ms</text>'
    )
    ends = ((_LEFT, "start", groups[0][0]["step"]), (_WIDTH - 4, "end", groups[-1][-1]["step"]))
    parts += [
        f'<text class="tick" x="{x}" y="{height + 26}" text-anchor="{anchor}">step {step}</text>'
        for x, anchor, step in ends
    ]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height + 32}" class="bars">{"".join(parts)}</svg>'
        f"{_draw_legend(STEP_PHASE_COLORS)}"
    )


def compute_mean_phases(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds of each phase over these steps; `rest` is the time that no phase accounts for."""
    phases = [phase for phase in STEP_PHASE_COLORS if phase != "rest"]
    means = {phase: sum(line.get(f"time/{phase}_s", 0.0) for line in lines) / len(lines) for phase in phases}
    step_s = sum(line["time/step_s"] for line in lines) / len(lines)
    accounted_s = sum(seconds for phase, seconds in means.items() if phase != "checkpoint")
    return means | {"rest": max(0.0, step_s - accounted_s)}


def _draw_legend(colors: Mapping[str, str]) -> str:
    items = (f'<span><i style="background:{color}"></i>{name}</span>' for name, color in colors.items())
    return f'<p class="legend">{"".join(items)}</p>'
