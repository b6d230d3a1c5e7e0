"""HTML page of a report, with its styles, data and script inlined. The page loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from raytrain_hpc.run_report.charts import Chart, draw_figure
from raytrain_hpc.run_report.comparison import flatten_config, format_setting, render_comparison, render_facts
from raytrain_hpc.run_report.curves import build_axis_rows, build_curves, build_marks, build_step_time_chart
from raytrain_hpc.run_report.html_table import render_table
from raytrain_hpc.run_report.incident_table import render_incidents
from raytrain_hpc.run_report.memory_bars import render_memory
from raytrain_hpc.run_report.placement_map import render_placement
from raytrain_hpc.run_report.profile_table import render_profiles
from raytrain_hpc.run_report.run_reader import RunRecord
from raytrain_hpc.run_report.summary import summarize_facts, summarize_results

SCRIPTS = ("scale.js", "charts.js", "page.js")
_TOOLS = (
    '<form id="tools" hidden><fieldset><legend>x axis</legend>'
    '<label><input type="radio" name="x" value="step" checked>steps</label>'
    '<label><input type="radio" name="x" value="tokens">tokens</label>'
    '<label><input type="radio" name="x" value="time">time</label></fieldset>'
    '<fieldset><legend>y axis</legend><label><input type="checkbox" name="log">logarithmic</label>'
    '<label><input type="checkbox" name="full">show outliers</label></fieldset>'
    '<fieldset><legend>smoothing</legend><input type="range" name="smoothing" min="0" max="0.98" step="0.02" value="0"'
    ' aria-label="smoothing"><output>off</output></fieldset></form>'
)


class _Figures:
    """Numbered charts of a page: each is drawn as HTML and kept for the script."""

    def __init__(self) -> None:
        self.charts: list[Chart] = []

    def draw(self, chart: Chart) -> str:
        """Return the chart as HTML; empty if it has no points."""
        if chart.is_empty:
            return ""
        self.charts.append(chart)
        return draw_figure(chart, len(self.charts) - 1)


def render_page(runs: Sequence[RunRecord]) -> str:
    """Return the self-contained HTML report of one or several runs."""
    runs, figures = name_apart(runs), _Figures()
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    if len(runs) == 1:
        top = [_render_summary(runs[0]), _render_sample(runs[0]), _render_curves(runs, figures)]
        top += _render_details(runs[0], 0, figures)
    else:
        top = [render_comparison(runs), _render_curves(runs, figures), render_facts(runs)]
        for index, run in enumerate(runs):
            top += [f'<h1 class="run">{escape(run.name)}</h1>', _render_sample(run)]
            top += _render_details(run, index, figures)
    body = [
        f"<h1>{escape(title)}</h1>",
        *top,
        f"<footer>{_describe_page()}</footer>",
        _render_data(runs, figures.charts),
    ]
    package = files(__package__)
    style, *scripts = (package.joinpath(name).read_text() for name in ("style.css", *SCRIPTS))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style>"
    )
    script = f"<script>{''.join(scripts)}</script>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}{script}</body></html>'


def name_apart(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with distinct names: the name of the directory, or its path, replaces one that several have."""
    named = list(runs)
    for get_name in (lambda run: run.location.name, lambda run: str(run.location)):
        counts = Counter(run.name for run in named)
        named = [replace(run, name=get_name(run)) if counts[run.name] > 1 else run for run in named]
    return named


def _render_summary(run: RunRecord) -> str:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in summarize_results(run).items()
    )
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in summarize_facts(run).items())
    return f'<dl class="tiles">{tiles}</dl><dl class="facts">{facts}</dl>'


def _render_sample(run: RunRecord) -> str:
    """Return the texts that the model wrote at the newest sampled step; empty without samples."""
    newest = [sample for sample in run.samples if sample.get("step") == run.samples[-1].get("step")]
    texts = "".join(
        f"<pre><b>{escape(str(sample.get('prompt', '')).lstrip())}</b>{escape(str(sample.get('answer', '')))}</pre>"
        for sample in newest
    )
    return f"<h2>Text sample, step {newest[0].get('step')}</h2>{texts}" if newest else ""


def _render_curves(runs: Sequence[RunRecord], figures: _Figures) -> str:
    drawn = "".join(figures.draw(chart) for chart in build_curves(runs))
    if not drawn:
        return ""
    note = ""
    if any(run.incidents for run in runs):
        note = "<p class='caption'>Dashed vertical lines are incidents, numbered as in the table of incidents.</p>"
    return f'<h2>Curves</h2>{_TOOLS}{note}<div class="charts">{drawn}</div>'


def _render_details(run: RunRecord, index: int, figures: _Figures) -> list[str]:
    """Return the sections about run number `index` alone."""
    step_time = figures.draw(replace(build_step_time_chart(run, index), marks=build_marks(run, index, False)))
    parts = [
        ("Incidents", render_incidents(run)),
        ("Step time", step_time + _render_rank_statistics(run)),
        ("Memory per rank", render_memory(run)),
        ("Placement", render_placement(run)),
        ("Pipeline", _render_pipeline(run)),
        ("Profile", render_profiles(run)),
        ("Settings", _render_settings(run)),
    ]
    return [f"<section><h2>{title}</h2>{content}</section>" for title, content in parts if content]


def _render_settings(run: RunRecord) -> str:
    lines = [f"{key}={format_setting(value)}" for key, value in flatten_config(run.config).items()]
    summary = f"<summary>all {len(lines)} settings</summary>"
    return f'<details class="settings">{summary}<pre>{escape(chr(10).join(lines))}</pre></details>'


def _render_rank_statistics(run: RunRecord) -> str:
    """Return a table of the statistics over ranks, of the last step that has them."""
    lines = [line for line in run.metrics if any(key.startswith("ranks/") for key in line)]
    if not lines:
        return ""
    metrics = lines[-1]
    keys = [key for key in metrics if key.startswith("ranks/") and key.endswith("/mean")]
    rows = []
    for name in (key[len("ranks/") : -len("/mean")] for key in keys):
        scale, unit = (1000.0, "ms") if name.startswith("time/") else (1.0, "GiB")
        values = [metrics[f"ranks/{name}/{kind}"] * scale for kind in ("mean", "min", "max", "std")]
        label = "peak memory" if unit == "GiB" else name.partition("/")[2].removesuffix("_s")
        rows.append([escape(f"{label} ({unit})"), *(f"{value:.2f}" for value in values)])
    caption = f"<p class='caption'>Over {metrics.get('elastic/world_size')} ranks, at step {metrics['step']}:</p>"
    return caption + render_table(("", "mean", "min", "max", "std"), rows)


def _render_pipeline(run: RunRecord) -> str:
    if run.timeline is None:
        return ""
    name, picture = run.timeline
    svg = re.sub(r"^<svg ([^>]*)>", _make_scalable, picture)
    caption = f"<p>{escape(name)}: forward blue, backward red, weight gradients green</p>"
    return f'{caption}<div class="scroll pipeline">{svg}</div>'


def _make_scalable(match: re.Match[str]) -> str:
    size = dict(re.findall(r'(width|height)="(\d+)"', match[1]))
    return f'<svg viewBox="0 0 {size["width"]} {size["height"]}">'


def _render_data(runs: Sequence[RunRecord], charts: Sequence[Chart]) -> str:
    """Return the charts' data for the script."""
    data = {
        "runs": [{"name": run.name, "axis": build_axis_rows(run)} for run in runs],
        "charts": [chart.to_json() for chart in charts],
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{text}</script>'


def _describe_page() -> str:
    now = datetime.now(UTC)
    return f"Written by raytrain-hpc report on {now:%Y-%m-%d %H:%M} UTC. Losses are in nats per token."
