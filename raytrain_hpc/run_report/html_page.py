"""The page: HTML with its styles and its script in it, and nothing that is fetched from anywhere."""

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
    "train/loss": "training loss, nats a token (dots: validation)",
    "throughput/tokens_per_sec": "tokens a second",
    "train/lr": "learning rate",
    "train/grad_norm": "gradient norm before clipping",
    "throughput/mfu": "model FLOPs utilisation",
    "memory/peak_gib": "peak memory of rank 0, GiB",
}
_INCIDENT_COLOR = "#d62728"
_MAX_STACK_CHARS = 4000


def render_page(runs: Sequence[RunRecord]) -> str:
    """The report of one run, or of several beside each other. Needs no other file and no network."""
    title = ", ".join(run.name for run in runs)
    sections = [f"<h1>{escape(title)}</h1>", _render_results(runs), _render_curves(runs)]
    for run in runs:
        if len(runs) > 1:
            sections.append(f"<h1>{escape(run.name)}</h1>")
        sections += _render_run(run)
    home = files(__package__)
    style, script = (home.joinpath(name).read_text() for name in ("style.css", "script.js"))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    body = "".join(part for part in sections if part)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}<script>{script}</script></body></html>'


def _render_results(runs: Sequence[RunRecord]) -> str:
    rows = []
    for run, colour in zip(runs, _assign_colors(runs), strict=True):
        last, result = run.last_metrics, run.result
        layout = {axis: size for axis, size in run.plan.get("layout", {}).items() if _is_informative(axis, size)}
        rows.append(
            [
                f'<i class="dot" style="background:{colour}"></i>{escape(run.name)}',
                escape(str(result.get("outcome", "under way"))),
                f"{last.get('step', 0)} of {run.config.get('train', {}).get('steps', '?')}",
                _format_cell(last.get("train/loss")),
                _format_cell(result.get("val/loss", _get_last_value(run, "val/loss"))),
                _format_cell(last.get("train/tokens")),
                _format_cell(_compute_median_throughput(run)),
                _format_percent(result.get("goodput")),
                str(len(run.incidents)),
                str(last.get("elastic/world_size", run.plan.get("workers", "?"))),
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
        for run, colour in zip(runs, _assign_colors(runs), strict=True):
            lines.append(Line(run.name, run.get_points(key), colour))
            if key == "train/loss":
                lines.append(Line(f"{run.name}, validation", run.get_points("val/loss"), colour, has_markers=True))
        charts.append(draw_line_chart(title, lines, marks))
    return f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>'


def _make_incident_marks(run: RunRecord) -> Iterable[Mark]:
    for incident in run.incidents:
        yield Mark(float(incident.get("step") or 0), _describe_incident(incident), _INCIDENT_COLOR)


def _describe_incident(incident: dict[str, Any]) -> str:
    where = "" if incident.get("rank") is None else f": rank {incident['rank']} on {incident.get('node')}"
    seconds = incident.get("recovered_s")
    after = "" if seconds is None else f"; next step {seconds:.2f} s later"
    return f"{incident.get('kind')}{where}, at step {incident.get('step')}{after}"


def _render_run(run: RunRecord) -> list[str]:
    parts = [
        ("Where the time of a step goes", draw_step_time(run) + _render_rank_statistics(run)),
        ("Memory of a rank", draw_memory(run)),
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
    """How ranks differ, in the last step that was looked at."""
    lines = [line for line in run.metrics if any(key.startswith("ranks/") for key in line)]
    if not lines:
        return ""
    last = lines[-1]
    names = [key[len("ranks/") : -len("/mean")] for key in last if key.startswith("ranks/") and key.endswith("/mean")]
    rows = []
    for name in names:
        scale, unit = (1000.0, "ms") if name.startswith("time/") else (1.0, "GiB")
        values = [last[f"ranks/{name}/{kind}"] * scale for kind in ("mean", "min", "max", "std")]
        rows.append([escape(name.partition("/")[2].rpartition("_")[0]), *(f"{value:.3f} {unit}" for value in values)])
    ranks = last.get("elastic/world_size")
    said = f"<p>Over {ranks} ranks, at step {last['step']}:</p>"
    return said + _render_table(("", "mean", "least", "most", "deviation"), rows)


def _render_pipeline(run: RunRecord) -> str:
    if run.timeline is None:
        return ""
    name, picture = run.timeline
    shown = re.sub(r"^<svg ([^>]*)>", _make_scalable, picture)
    return f"<p>{escape(name)}: forwards blue, backwards red, gradients of weights green</p>{shown}"


def _make_scalable(match: re.Match[str]) -> str:
    size = dict(re.findall(r'(width|height)="(\d+)"', match[1]))
    return f'<svg class="bars" viewBox="0 0 {size["width"]} {size["height"]}">'


def _render_incidents(run: RunRecord) -> str:
    rows = []
    for one in run.incidents:
        at = datetime.fromtimestamp(one["time"], UTC).strftime("%Y-%m-%d %H:%M:%S") if one.get("time") else ""
        stacks = one.get("stacks") or ""
        text = stacks if isinstance(stacks, str) else "\n".join(f"rank {rank}\n{of}" for rank, of in stacks.items())
        more = (
            f"<details><summary>stacks</summary><pre>{escape(text[:_MAX_STACK_CHARS])}</pre></details>" if text else ""
        )
        rank = one.get("rank")
        rows.append(
            [
                at,
                escape(str(one.get("kind"))),
                "" if rank is None else str(rank),
                escape(str(one.get("node") or "")[:12]),
                str(one.get("step")),
                _format_cell(one.get("detected_s")),
                _format_cell(one.get("recovered_s")),
                _format_cell(one.get("steps_lost")),
                escape(str(one.get("operation") or ""))
                + f"<br><small>{escape(str(one.get('reason') or ''))}</small>{more}",
            ]
        )
    names = ("when (UTC)", "what", "rank", "node", "step", "detected, s", "recovered, s", "steps lost", "where")
    return _render_table(names, rows) if rows else ""


def _render_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of cells that are HTML already."""
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
