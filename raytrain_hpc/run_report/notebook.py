"""Live view of a run in a notebook: a few metrics and the loss curve."""

from __future__ import annotations

from html import escape
from pathlib import Path

from raytrain_hpc.run_report.charts import Line, Mark, draw_line_chart, format_number
from raytrain_hpc.run_report.figures import COLORS
from raytrain_hpc.run_report.run_reader import RunRecord, read_run

_STYLE = "max-width:640px;font:13px system-ui,sans-serif"
_CHART_STYLE = "<style>.rt-live .grid{stroke:#8884}.rt-live text{fill:currentColor;font:11px system-ui}</style>"


def render_live_html(run_dir: str | Path, state: str) -> str:
    """Return HTML with current metrics and the loss curve, or only `state` if the run has not written anything yet."""
    if not (Path(run_dir) / "config.yaml").exists():
        return f'<div style="{_STYLE}"><b>{escape(str(run_dir))}</b>: {escape(state)}</div>'
    run = read_run(run_dir)
    marks = [Mark(float(incident.get("step") or 0), str(incident.get("kind")), "#d62728") for incident in run.incidents]
    lines = [
        Line("training", run.get_points("train/loss"), COLORS[0]),
        Line("validation", run.get_points("val/loss"), COLORS[1], has_markers=True),
    ]
    cells = "".join(f"<td><small>{name}</small><br><b>{value}</b></td>" for name, value in _collect_figures(run, state))
    chart = draw_line_chart("loss, nats per token", lines, marks)
    return f'<div class="rt-live" style="{_STYLE}">{_CHART_STYLE}<table><tr>{cells}</tr></table>{chart}</div>'


def _collect_figures(run: RunRecord, state: str) -> list[tuple[str, str]]:
    metrics = run.last_metrics
    figures = [("run", escape(run.name)), ("state", escape(state))]
    if metrics:
        figures += [
            ("step", f"{metrics['step']}/{run.config['train']['steps']}"),
            ("loss", format_number(metrics["train/loss"])),
            ("tokens/s", format_number(metrics["throughput/tokens_per_sec"])),
            ("ranks", str(metrics["elastic/world_size"])),
        ]
    return [*figures, ("incidents", str(len(run.incidents)))]
