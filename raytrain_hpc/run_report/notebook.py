"""A run as a notebook shows it: a few figures and its loss curve, again and again while it goes on."""

from __future__ import annotations

from html import escape
from pathlib import Path

from raytrain_hpc.run_report.charts import Line, Mark, draw_line_chart, format_number
from raytrain_hpc.run_report.figures import COLORS
from raytrain_hpc.run_report.run_reader import RunRecord, read_run

_STYLE = "max-width:640px;font:13px system-ui,sans-serif"
_CHART_STYLE = "<style>.rt-live .grid{stroke:#8884}.rt-live text{fill:currentColor;font:11px system-ui}</style>"


def render_live_html(run_dir: str | Path, state: str) -> str:
    """A table and a curve; `state`: what the run is doing. Before anything is written, that alone."""
    if not (Path(run_dir) / "config.yaml").exists():
        return f'<div style="{_STYLE}"><b>{escape(str(run_dir))}</b>: {escape(state)}</div>'
    run = read_run(run_dir)
    marks = [Mark(float(one.get("step") or 0), str(one.get("kind")), "#d62728") for one in run.incidents]
    lines = [
        Line("training", run.get_points("train/loss"), COLORS[0]),
        Line("validation", run.get_points("val/loss"), COLORS[1], has_markers=True),
    ]
    cells = "".join(f"<td><small>{name}</small><br><b>{value}</b></td>" for name, value in _collect_figures(run, state))
    chart = draw_line_chart("loss, nats a token", lines, marks)
    return f'<div class="rt-live" style="{_STYLE}">{_CHART_STYLE}<table><tr>{cells}</tr></table>{chart}</div>'


def _collect_figures(run: RunRecord, state: str) -> list[tuple[str, str]]:
    last = run.last_metrics
    figures = [("run", escape(run.name)), ("state", escape(state))]
    if last:
        figures += [
            ("step", f"{last['step']}/{run.config['train']['steps']}"),
            ("loss", format_number(last["train/loss"])),
            ("tokens/s", format_number(last["throughput/tokens_per_sec"])),
            ("ranks", str(last["elastic/world_size"])),
        ]
    return [*figures, ("incidents", str(len(run.incidents)))]
