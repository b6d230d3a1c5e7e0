"""Incidents of a run, in one sentence and as an HTML table."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Any

from raytrain_hpc.observability.console import format_incident, format_phases
from raytrain_hpc.run_report.html_table import render_table
from raytrain_hpc.run_report.run_reader import RunRecord
from raytrain_hpc.run_report.scale import format_number

_NAMES = (
    "",
    "time (UTC)",
    "what",
    "rank",
    "node",
    "after step",
    "detected (s)",
    "recovered (s)",
    "steps lost",
    "where",
)
_MAX_STACK_CHARS = 4000


def describe_incident(incident: dict[str, Any]) -> str:
    """Return an incident in one line: what happened to which rank, where, and what it cost."""
    node = f" on {incident['node']}" if incident.get("node") else ""
    parts = [f"{format_incident(incident)}{node}"]
    if incident.get("recovered_s") is not None:
        parts.append(f"recovered in {incident['recovered_s']:.2f} s")
    if incident.get("world_after") is not None and incident["world_after"] != incident.get("world"):
        parts.append(f"{incident['world']} → {incident['world_after']} ranks")
    if incident.get("steps_lost") is not None:
        parts.append(f"{incident['steps_lost']} steps lost")
    return "; ".join(parts)


def render_incidents(run: RunRecord) -> str:
    """Return the table of a run's incidents, numbered like their marks in charts; empty without any."""
    if not run.incidents:
        return ""
    rows = [_render_row(run, number, incident) for number, incident in enumerate(run.incidents, 1)]
    return f'<div class="incidents">{render_table(_NAMES, rows)}</div>'


def _render_row(run: RunRecord, number: int, incident: dict[str, Any]) -> list[str]:
    unix, rank = incident.get("time"), incident.get("rank")
    detected, recovered = (
        "" if incident.get(key) is None else format_number(incident[key]) for key in ("detected_s", "recovered_s")
    )
    phases = f"<br><small>{escape(format_phases(incident['phases']))}</small>" if incident.get("phases") else ""
    where = [
        escape(str(incident.get("operation") or "")),
        f"<small>{escape(str(incident.get('reason') or ''))}</small>",
        *([f"<small>GPU: {escape(str(incident['device']))}</small>"] if incident.get("device") else []),
    ]
    return [
        f'<b class="alert">{number}</b>',
        datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S") if unix else "",
        escape(str(incident.get("kind"))),
        "" if rank is None else str(rank),
        escape(str(incident.get("node") or "")),
        str(incident.get("step")),
        detected,
        f"{recovered}{phases}",
        "" if incident.get("steps_lost") is None else str(incident["steps_lost"]),
        "<br>".join(where) + _render_stacks(incident.get("stacks") or ""),
    ]


def _render_stacks(stacks: Any) -> str:
    if not stacks:
        return ""
    text = stacks if isinstance(stacks, str) else "\n".join(f"rank {rank}\n{stack}" for rank, stack in stacks.items())
    return f"<details><summary>stacks</summary><pre>{escape(text[:_MAX_STACK_CHARS])}</pre></details>"
