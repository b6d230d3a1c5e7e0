"""Live view of a run in a notebook: a few metrics and the loss curve."""

from __future__ import annotations

from html import escape

from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.run_report.charts import draw_svg
from raytrain_hpc.run_report.curves import build_curves
from raytrain_hpc.run_report.run_reader import RunRecord, read_run
from raytrain_hpc.run_report.scale import format_number

_STYLE = "max-width:760px;font:13px system-ui,sans-serif"
# The palette of style.css in tones that are legible on light and dark pages: notebooks do not tell their theme.
_CHART_STYLE = (
    "<style>.rt-live .c0{--c:#3d85cc}.rt-live .c1{--c:#e07b1a}.rt-live .alert{--c:#e04545}"
    ".rt-live .grid{stroke:#8884}.rt-live text{fill:currentColor;font:12px system-ui}.rt-live .line{fill:none;"
    "stroke:var(--c);stroke-width:1.6}.rt-live .line.sparse{stroke-width:2.4}.rt-live .dot{fill:var(--c)}"
    ".rt-live .mark{stroke:var(--c);stroke-dasharray:4 3}.rt-live .marklabel{fill:var(--c)}"
    ".rt-live .clipped{fill:currentColor}.rt-live i{display:inline-block;width:1em;height:3px;background:var(--c);"
    "vertical-align:middle;margin:0 .4em 0 1em}</style>"
)
_LEGEND = '<div><b>loss</b> <i class="c0"></i>training <i class="c1"></i>validation</div>'


def render_live_html(directory: RunDirectory, state: str) -> str:
    """Return HTML with current metrics and the loss curve, or only `state` if the run has not written anything yet."""
    if not directory.config.exists():
        return f'<div style="{_STYLE}"><b>{escape(str(directory.location))}</b>: {escape(state)}</div>'
    run = read_run(directory)
    cells = "".join(f"<td><small>{name}</small><br><b>{value}</b></td>" for name, value in _collect_figures(run, state))
    charts = build_curves([run])
    chart = _LEGEND + draw_svg(charts[0])[0] if charts else ""
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
