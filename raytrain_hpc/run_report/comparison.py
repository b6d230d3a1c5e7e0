"""Comparison of several runs: results and facts side by side, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import yaml

from raytrain_hpc.run_report.charts import NUM_COLORS
from raytrain_hpc.run_report.html_table import render_table
from raytrain_hpc.run_report.run_reader import Json, RunRecord
from raytrain_hpc.run_report.summary import summarize_facts, summarize_results

_OWN_KEYS = {"run.name", "run.dir"}  # differ between all runs
_MAX_COLUMNS = 4  # runs that stand side by side; more are the rows of the table
_MISSING = "–"


def flatten_config(config: Json) -> dict[str, Any]:
    """Return the settings by dotted key."""
    return {
        f"{section}.{key}": value
        for section, keys in config.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }


def find_differences(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the keys whose values differ, each with the value of every run as text."""
    settings = [flatten_config(run.config) for run in runs]
    keys = dict.fromkeys(key for setting in settings for key in setting)
    rows = {
        key: [format_setting(setting[key]) if key in setting else _MISSING for setting in settings]
        for key in keys
        if key not in _OWN_KEYS
    }
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def format_setting(value: Any) -> str:
    """Return a value as it is written on the command line: [{kind: kill, rank: 1}]."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """Return a table of the results of the runs and of the settings that differ. Up to 4 runs stand side by side."""
    differences = find_differences(runs)
    groups = {"Results": _gather_rows([summarize_results(run) for run in runs]), "Settings that differ": differences}
    note = "" if differences else "<p>All settings but name and directory are the same.</p>"
    return _render_matrix(runs, {title: rows for title, rows in groups.items() if rows}) + note


def render_facts(runs: Sequence[RunRecord]) -> str:
    """Return a table of date, duration, hardware, layout, model and versions of the runs."""
    return _render_matrix(runs, {"Facts": _gather_rows([summarize_facts(run) for run in runs])})


def _gather_rows(columns: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """Return name -> value of each run, over the names that any run has."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name, _MISSING) for column in columns] for name in names}


def _render_matrix(runs: Sequence[RunRecord], groups: dict[str, dict[str, list[str]]]) -> str:
    """Return a table with a column per run, the groups below each other; or with a row per run if they are many."""
    names = [
        f'<span class="swatch c{index % NUM_COLORS}"><i></i>{escape(run.name)}</span>' for index, run in enumerate(runs)
    ]
    matrix = [["", *names]]
    for number, (title, rows) in enumerate(groups.items()):
        if number and len(runs) <= _MAX_COLUMNS:
            matrix.append([f"<b>{title}</b>", *[""] * len(runs)])
        matrix += [[escape(name), *map(escape, values)] for name, values in rows.items()]
    if len(runs) > _MAX_COLUMNS:
        matrix = [list(column) for column in zip(*matrix, strict=True)]
    return f"<h2>{next(iter(groups))}</h2>{render_table(matrix[0], matrix[1:])}"
