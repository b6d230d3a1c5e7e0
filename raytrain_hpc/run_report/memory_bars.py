"""Memory of a rank by kind: the planner's estimate beside what was measured, as bars and a table."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from raytrain_hpc.run_report.html_table import render_table
from raytrain_hpc.run_report.run_reader import RunRecord
from raytrain_hpc.run_report.scale import format_number

_GIB, _MIB = 2**30, 2**20
# Kind with its color. The planner's names of bytes in plan.json, and what they are called here.
_COLORS = {"weights": 0, "gradients": 3, "optimizer state": 2, "weight copies": 4, "activations": 1}
_COLORS |= {"working memory": 5, "not counted by kind": 7}
_PLANNED = {"weights": "weights", "gradients": "gradients", "moments": "optimizer state", "copies": "weight copies"}
_PLANNED |= {"activations": "activations", "working": "working memory"}
_COLUMN_NAMES = {"planned": "planned: estimate", "measured": "measured on rank 0"}
_MEASURED = {"weights": "weights", "gradients": "gradients", "moments": "optimizer state"}


def render_memory(run: RunRecord) -> str:
    """Return bars and a table of planned and measured memory by kind; empty if nothing is known."""
    planned = (
        {name: float(run.plan["memory"].get(key, 0)) for key, name in _PLANNED.items()}
        if run.plan.get("memory")
        else {}
    )
    measured = _measure(run)
    bars = {name: bar for name, bar in (("planned", planned), ("measured", measured)) if sum(bar.values())}
    if not bars:
        return ""
    capacity = _get_device_memory(run)
    largest = max([*(sum(bar.values()) for bar in bars.values()), (capacity or 0) * _GIB])
    unit, size = ("GiB", _GIB) if largest >= _GIB else ("MiB", _MIB)
    html = "".join(_render_bar(name, bar, largest, unit, size) for name, bar in bars.items())
    kinds = [kind for kind in _COLORS if any(bar.get(kind) for bar in bars.values())]
    rows = [[_render_kind(kind), *(_render_size(bar.get(kind), size) for bar in bars.values())] for kind in kinds]
    rows.append(["<b>sum</b>", *(f"<b>{_render_size(sum(bar.values()), size)}</b>" for bar in bars.values())])
    names = ("kind", *(f"{_COLUMN_NAMES[name]} ({unit})" for name in bars))
    device = f" The full width is the device: {capacity:.1f} GiB." if capacity else ""
    return f'<div class="bars">{html}</div>{render_table(names, rows)}<p class="note">{_explain(run)}{device}</p>'


def _measure(run: RunRecord) -> dict[str, float]:
    """Return bytes on rank 0 by kind: state as counted after the last step, the rest up to the highest peak.

    Optimizer state that is offloaded is left out: it is in no memory of the device.
    """
    metrics = run.last_metrics
    keys = [
        key for key in _MEASURED if f"memory/{key}_gib" in metrics and not (key == "moments" and _is_offloaded(run))
    ]
    sizes = {_MEASURED[key]: metrics[f"memory/{key}_gib"] * _GIB for key in keys}
    peak = max((value for _, value in run.get_points("memory/peak_gib")), default=0.0) * _GIB
    return sizes | {"not counted by kind": max(0.0, peak - sum(sizes.values()))}


def _explain(run: RunRecord) -> str:
    """Say which numbers are estimates, and what the measured remainder contains."""
    texts = []
    if run.plan.get("memory"):
        texts.append("Planned: the planner's estimate before the run, for the rank that needs the most memory.")
    remainder = "activations and working memory"
    if all(str(worker.get("device")) == "cpu" for worker in run.workers):
        remainder = (
            "activations, working memory and, as the peak on a CPU is the resident memory of the whole process, the "
            "interpreter and its libraries"
        )
    texts.append(f"Measured: state is counted by kind; the remainder up to the peak holds {remainder}.")
    if _is_offloaded(run):
        texts.append("Optimizer state is offloaded, and not on the device.")
    return " ".join(texts)


def _is_offloaded(run: RunRecord) -> bool:
    return str(run.config.get("parallel", {}).get("offload", "none")) != "none"


def _get_device_memory(run: RunRecord) -> float | None:
    sizes = [worker["memory_gib"] for worker in run.workers if worker.get("memory_gib")]
    return min(sizes) if sizes else None


def _render_bar(name: str, bar: Mapping[str, float], largest: float, unit: str, size: float) -> str:
    parts = "".join(
        f'<i class="c{_COLORS[kind]}" style="width:{100 * value / largest:.2f}%" '
        f'title="{escape(kind)}: {_render_size(value, size)} {unit}"></i>'
        for kind, value in bar.items()
        if value
    )
    total = f"{_render_size(sum(bar.values()), size)} {unit}"
    return f'<div class="bar"><span>{name}, {total}</span><div>{parts}</div></div>'


def _render_kind(kind: str) -> str:
    return f'<span class="swatch c{_COLORS[kind]}"><i></i>{escape(kind)}</span>'


def _render_size(value: float | None, size: float) -> str:
    return "" if value is None else format_number(value / size)
