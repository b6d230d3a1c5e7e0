"""The charts of a report: which metrics are drawn, with which units, lines and incident marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from raytrain_hpc.run_report.charts import MAX_STACKED_POINTS, Chart, Line, Mark
from raytrain_hpc.run_report.incident_table import describe_incident
from raytrain_hpc.run_report.run_reader import RunRecord

# Key, title, unit of the y axis, factor from the metric to the unit, whether the values have no noise.
_METRICS = (
    ("throughput/tokens_per_sec", "Throughput", "tokens/s", 1.0, False),
    ("throughput/mfu", "Model FLOPs utilization", "% of peak", 100.0, False),
    ("train/grad_norm", "Gradient norm before clipping", "L2 norm", 1.0, False),
    ("train/lr", "Learning rate", "learning rate", 1.0, True),
    ("memory/peak_gib", "Peak memory of rank 0", "GiB", 1.0, True),
)
STEP_PHASES = {"forward": 0, "backward": 3, "communication": 1, "optimizer": 2, "data": 6, "rest": 7, "checkpoint": 4}
_MAX_AXIS_ROWS = 1000
_PAUSE_S = 600.0  # longer than a recovery; a change of generation that took longer was a new start of the run


def build_curves(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of all runs, the loss first. Charts without data are left out."""
    marks = [mark for index, run in enumerate(runs) for mark in build_marks(run, index, len(runs) > 1)]
    charts = [_build_loss_chart(runs, marks)]
    for key, title, unit, factor, is_exact in _METRICS:
        lines = [
            Line(run.name, [(step, factor * value) for step, value in run.get_points(key)], index, run=index)
            for index, run in enumerate(runs)
        ]
        charts.append(Chart(title, unit, lines, marks, is_exact=is_exact))
    if len(runs) > 1:
        lines = [Line(run.name, run.get_points("time/step_s"), index, run=index) for index, run in enumerate(runs)]
        charts.append(Chart("Step time", "s per step", lines, marks))
    charts.append(_build_rank_chart(runs, marks))
    return [chart for chart in charts if not chart.is_empty]


def _build_loss_chart(runs: Sequence[RunRecord], marks: Sequence[Mark]) -> Chart:
    """Return the loss chart: one run with a color per split, several with a color per run."""
    lines = []
    for index, run in enumerate(runs):
        names = (run.name, f"{run.name}, validation") if len(runs) > 1 else ("training", "validation")
        lines.append(Line(names[0], run.get_points("train/loss"), index, run=index))
        color = index if len(runs) > 1 else 1
        lines.append(Line(names[1], run.get_points("val/loss"), color, is_sparse=True, run=index))
    return Chart("Loss", "nats per token", lines, marks, keeps_start=True, is_wide=True)


def _build_rank_chart(runs: Sequence[RunRecord], marks: Sequence[Mark]) -> Chart:
    """Return the chart of the number of ranks, as stairs; without lines if no run has changed it."""
    lines = []
    for index, run in enumerate(runs):
        points = run.get_points("elastic/world_size")
        stairs = points[:1]
        for (_, old), (step, new) in pairwise(points):
            stairs += [(step, old), (step, new)] if new != old else []
        lines.append(Line(run.name, [*stairs, *points[-1:]], index, run=index))
    if all(len({ranks for _, ranks in line.points}) < 2 for line in lines):
        lines = []
    return Chart("Ranks", "ranks", lines, marks, is_counted=True)


def build_step_time_chart(run: RunRecord, index: int) -> Chart:
    """Return the chart of step time by phase, of run number `index`."""
    lines = [line for line in run.metrics if "time/forward_s" in line]
    phases = [compute_phases(line) for line in lines]
    durations = sorted(sum(phase.values()) for phase in phases)
    unit, factor = ("ms", 1000.0) if durations and durations[len(durations) // 2] < 1 else ("s", 1.0)
    layers = [
        Line(name, [(line["step"], factor * phase[name]) for line, phase in zip(lines, phases, strict=True)], color)
        for name, color in STEP_PHASES.items()
        if any(phase[name] for phase in phases)
    ]
    layers = [Line(line.name, line.points, line.color, run=index) for line in layers]
    group_size = -(-len(lines) // MAX_STACKED_POINTS)
    means = f", means of {group_size} steps" if group_size > 1 else ""
    return Chart(f"Step time by phase, rank 0{means}", f"{unit} per step", layers, is_stacked=True, is_wide=True)


def compute_phases(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase of a step. `rest` is the time of the step that no phase accounts for."""
    phases = {name: float(metrics.get(f"time/{name}_s") or 0.0) for name in STEP_PHASES}
    accounted_s = sum(phases.values()) - phases["checkpoint"]  # a checkpoint is no part of the step
    return phases | {"rest": max(0.0, metrics["time/step_s"] - accounted_s)}


def build_marks(run: RunRecord, index: int, has_several_runs: bool) -> list[Mark]:
    """Return the marks of a run's incidents, numbered as in its table, in the run's color beside other runs."""
    color, prefix = (index, f"{run.name}: ") if has_several_runs else (None, "")
    return [
        Mark(float(incident.get("step") or 0), str(number), prefix + describe_incident(incident), color, index)
        for number, incident in enumerate(run.incidents, 1)
    ]


def build_axis_rows(run: RunRecord) -> list[tuple[float, float, float]]:
    """Return (step, tokens, seconds since the first step began) at up to 1000 steps, for other x axes."""
    tokens, seconds = dict(run.get_points("train/tokens")), compute_elapsed(run.metrics)
    rows = [
        (float(line["step"]), tokens.get(line["step"], 0.0), round(elapsed, 3))
        for line, elapsed in zip(run.metrics, seconds, strict=True)
    ]
    stride = -(-len(rows) // _MAX_AXIS_ROWS) or 1
    return [*rows[:-1:stride], *rows[-1:]]


def compute_elapsed(metrics: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds from the beginning of the first step to the commit of each step.

    A pause between two starts of a run is left out: there the generation changes and no step was committed for long.
    """
    elapsed: list[float] = []
    for index, line in enumerate(metrics):
        step_s = float(line["time/step_s"])
        if not index:
            elapsed.append(step_s)
            continue
        previous = metrics[index - 1]
        passed_s = max(0.0, line["time/unix"] - previous["time/unix"])
        if line["elastic/generation"] != previous["elastic/generation"] and passed_s > _PAUSE_S + step_s:
            passed_s = step_s
        elapsed.append(elapsed[-1] + passed_s)
    return elapsed
