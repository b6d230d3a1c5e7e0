"""HTML page of a report, with its styles and script inlined. The page loads nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from raytrain_hpc.run_report.charts import Line, Mark, draw_line_chart, format_number
from raytrain_hpc.run_report.figures import COLORS, draw_memory, draw_placement, draw_step_time
from raytrain_hpc.run_report.run_reader import RunRecord

_CURVE_TITLES = {
    "train/loss": "training loss, nats per token (dots: validation)",
    "throughput/tokens_per_sec": "tokens per second",
    "train/lr": "learning rate",
    "train/grad_norm": "gradient norm before clipping",
    "throughput/mfu": "model FLOPs utilization",
    "memory/peak_gib": "peak memory of rank 0, GiB",
}
_INCIDENT_COLOR = "#d62728"
_MAX_STACK_CHARS = 4000


def render_page(runs: Sequence[RunRecord]) -> str:
    """Return the self-contained HTML report of one or several runs."""
    title = ", ".join(run.name for run in runs)
    sections = [f"<h1>{escape(title)}</h1>", _render_results(runs), _render_curves(runs)]
    for run in runs:
        if len(runs) > 1:
            sections.append(f"<h1>{escape(run.name)}</h1>")
        sections += _render_run(run)
    package = files(__package__)
    style, script = (package.joinpath(name).read_text() for name in ("style.css", "script.js"))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    body = "".join(part for part in sections if part)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}<script>{script}</script></body></html>'


def _render_results(runs: Sequence[RunRecord]) -> str:
    rows = []
    for run, color in zip(runs, _assign_colors(runs), strict=True):
        metrics, result = run.last_metrics, run.result
        layout = {axis: size for axis, size in run.plan.get("layout", {}).items() if _is_informative(axis, size)}
        rows.append(
            [
                f'<i class="dot" style="background:{color}"></i>{escape(run.name)}',
                escape(str(result.get("outcome", "running"))),
                f"{metrics.get('step', 0)} of {run.config.get('train', {}).get('steps', '?')}",
                _format_cell(metrics.get("train/loss")),
                _format_cell(result.get("val/loss", _get_last_value(run, "val/loss"))),
                _format_cell(metrics.get("train/tokens")),
                _format_cell(_compute_median_throughput(run)),
                _format_percent(result.get("goodput")),
                str(len(run.incidents)),
                str(metrics.get("elastic/world_size", run.plan.get("workers", "?"))),
                escape(" ".join(f"{axis}={size}" for axis, size in layout.items()) or "one rank"),
            ]
        )
    names = ("run", "outcome", "steps", "loss", "validation", "tokens", "tokens/s", "goodput", "incidents", "ranks")
    return _render_table((*names, "layout"), rows)


def _render_curves(runs: Sequence[RunRecord]) -> str:
    marks = [mark for run in runs for mark in _make_incident_marks(run)]
    charts = []
    for key, title in _CURVE_TITLES.items():
        lines = []
        for run, color in zip(runs, _assign_colors(runs), strict=True):
            lines.append(Line(run.name, run.get_points(key), color))
            if key == "train/loss":
                lines.append(Line(f"{run.name}, validation", run.get_points("val/loss"), color, has_markers=True))
        charts.append(draw_line_chart(title, lines, marks))
    return f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>'


def _make_incident_marks(run: RunRecord) -> Iterable[Mark]:
    for incident in run.incidents:
        yield Mark(float(incident.get("step") or 0), _describe_incident(incident), _INCIDENT_COLOR)


def _describe_incident(incident: dict[str, Any]) -> str:
    rank_text = "" if incident.get("rank") is None else f": rank {incident['rank']} on {incident.get('node')}"
    seconds = incident.get("recovered_s")
    recovery_text = "" if seconds is None else f"; next step {seconds:.2f} s later"
    return f"{incident.get('kind')}{rank_text}, at step {incident.get('step')}{recovery_text}"


def _render_run(run: RunRecord) -> list[str]:
    parts = [
        ("Step time by phase", draw_step_time(run) + _render_rank_statistics(run)),
        ("Memory per rank", draw_memory(run)),
        ("Layout and placement", draw_placement(run.workers) if run.workers else ""),
        ("Pipeline", _render_pipeline(run)),
        ("Incidents", _render_incidents(run)),
    ]
    config = "\n".join(
        f"{section}.{key}={value}"
        for section, keys in run.config.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    )
    settings = f"<details><summary>{escape(str(run.path))}</summary><pre>{escape(config)}</pre></details>"
    return [*(f"<h2>{title}</h2>{content}" for title, content in parts if content), f"<h2>Settings</h2>{settings}"]


def _render_rank_statistics(run: RunRecord) -> str:
    """Return a table of the statistics over ranks, of the last step that has them."""
    lines = [line for line in run.metrics if any(key.startswith("ranks/") for key in line)]
    if not lines:
        return ""
    metrics = lines[-1]
    names = [
        key[len("ranks/") : -len("/mean")] for key in metrics if key.startswith("ranks/") and key.endswith("/mean")
    ]
    rows = []
    for name in names:
        scale, unit = (1000.0, "ms") if name.startswith("time/") else (1.0, "GiB")
        values = [metrics[f"ranks/{name}/{kind}"] * scale for kind in ("mean", "min", "max", "std")]
        rows.append([escape(name.partition("/")[2].rpartition("_")[0]), *(f"{value:.3f} {unit}" for value in values)])
    num_ranks = metrics.get("elastic/world_size")
    caption = f"<p>Over {num_ranks} ranks, at step {metrics['step']}:</p>"
    return caption + _render_table(("", "mean", "min", "max", "std"), rows)


def _render_pipeline(run: RunRecord) -> str:
    if run.timeline is None:
        return ""
    name, picture = run.timeline
    svg = re.sub(r"^<svg ([^>]*)>", _make_scalable, picture)
    return f"<p>{escape(name)}: forward blue, backward red, weight gradients green</p>{svg}"


def _make_scalable(match: re.Match[str]) -> str:
    size = dict(re.findall(r'(width|height)="(\d+)"', match[1]))
    return f'<svg class="bars" viewBox="0 0 {size["width"]} {size["height"]}">'


def _render_incidents(run: RunRecord) -> str:
    rows = []
    for incident in run.incidents:
        time = (
            datetime.fromtimestamp(incident["time"], UTC).strftime("%Y-%m-%d %H:%M:%S") if incident.get("time") else ""
        )
        stacks = incident.get("stacks") or ""
        text = (
            stacks if isinstance(stacks, str) else "\n".join(f"rank {rank}\n{stack}" for rank, stack in stacks.items())
        )
        details = (
            f"<details><summary>stacks</summary><pre>{escape(text[:_MAX_STACK_CHARS])}</pre></details>" if text else ""
        )
        rank = incident.get("rank")
        rows.append(
            [
                time,
                escape(str(incident.get("kind"))),
                "" if rank is None else str(rank),
                escape(str(incident.get("node") or "")[:12]),
                str(incident.get("step")),
                _format_cell(incident.get("detected_s")),
                _format_cell(incident.get("recovered_s")),
                _format_cell(incident.get("steps_lost")),
                escape(str(incident.get("operation") or ""))
                + f"<br><small>{escape(str(incident.get('reason') or ''))}</small>{details}",
            ]
        )
    names = ("when (UTC)", "what", "rank", "node", "step", "detected, s", "recovered, s", "steps lost", "where")
    return _render_table(names, rows) if rows else ""


def _render_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table. The cells must be HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _assign_colors(runs: Sequence[RunRecord]) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(len(runs))]


def _is_informative(axis: str, size: object) -> bool:
    return axis != "schedule" and size not in (1, 0, None) and axis != "virtual_stages"


def _get_last_value(run: RunRecord, key: str) -> float | None:
    points = run.get_points(key)
    return points[-1][1] if points else None


def _compute_median_throughput(run: RunRecord) -> float | None:
    rates = sorted(rate for _, rate in run.get_points("throughput/tokens_per_sec"))
    return rates[len(rates) // 2] if rates else None


def _format_cell(value: float | None) -> str:
    return "" if value is None else format_number(value)


def _format_percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
