"""Placement of ranks on nodes as HTML boxes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from raytrain_hpc.run_report.charts import NUM_COLORS
from raytrain_hpc.run_report.run_reader import RunRecord


def render_placement(run: RunRecord) -> str:
    """Return one box per node with its ranks, colored by pipeline coordinate; empty if no workers are recorded."""
    nodes: dict[str, list[Mapping[str, Any]]] = {}
    for worker in sorted(run.workers, key=lambda worker: int(worker["rank"])):
        nodes.setdefault(str(worker["node"]), []).append(worker)
    boxes = []
    for node, ranks in nodes.items():
        cells = "".join(_render_rank(worker) for worker in ranks)
        boxes.append(f'<div class="node"><h4>{escape(node)}</h4>{cells}</div>')
    return f'<div class="nodes">{"".join(boxes)}</div>' if boxes else ""


def _render_rank(worker: Mapping[str, Any]) -> str:
    coordinates = worker.get("coordinates", {})
    position = " ".join(f"{axis}{index}" for axis, index in coordinates.items() if index or axis in ("pp", "tp"))
    color = int(coordinates.get("pp", 0)) % NUM_COLORS
    title = f"rank {worker['rank']}, pid {worker.get('pid')}, {worker.get('device')}: {position}"
    label = f"<b>{worker['rank']}</b><small>{escape(position)}</small>"
    return f'<span class="rank c{color}" title="{escape(title)}">{label}</span>'
