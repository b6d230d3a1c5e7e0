"""Summary of a run: its results as numbers, and the facts needed to repeat it."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from raytrain_hpc.observability.console import format_count, format_duration
from raytrain_hpc.run_report.curves import compute_elapsed
from raytrain_hpc.run_report.run_reader import RunRecord
from raytrain_hpc.run_report.scale import format_number

_MAX_NAMED_HOSTS = 4
_MAX_RANK_CHANGES = 8


def summarize_results(run: RunRecord) -> dict[str, str]:
    """Return the results of a run by name, formatted; those that are unknown are left out."""
    metrics, result = run.last_metrics, run.result
    val_points = run.get_points("val/loss")
    peak = max((value for _, value in run.get_points("memory/peak_gib")), default=None)
    mfu, lost = _get_median(run, "throughput/mfu"), sum(incident.get("steps_lost") or 0 for incident in run.incidents)
    values = {
        "outcome": str(result.get("outcome", "no result yet")),
        "steps": f"{metrics.get('step', 0)}/{run.config.get('train', {}).get('steps', '?')}",
        "training loss": _format(metrics.get("train/loss")),
        "validation loss": _format(val_points[-1][1] if val_points else result.get("val/loss")),
        "best validation": _format(min(loss for _, loss in val_points)) if len(val_points) > 1 else "",
        "tokens": "" if not metrics.get("train/tokens") else format_count(metrics["train/tokens"]),
        "tokens/s (median)": _format(_get_median(run, "throughput/tokens_per_sec")),
        "MFU (median)": "" if mfu is None else f"{100 * mfu:.1f} %",
        "peak memory": "" if peak is None else f"{peak:.2f} GiB",
        "goodput": "" if result.get("goodput") is None else f"{100 * result['goodput']:.1f} %",
        "incidents": str(len(run.incidents)),
        "steps lost": str(lost) if run.incidents else "",
    }
    return {name: value for name, value in values.items() if value}


def summarize_facts(run: RunRecord) -> dict[str, str]:
    """Return date, duration, hardware, layout, model, data and versions, as text; those unknown are left out."""
    facts = {
        "started": _describe_start(run),
        "duration": _describe_duration(run),
        "hardware": _describe_hardware(run),
        "ranks": _describe_ranks(run),
        "layout": _describe_layout(run),
        "model": _describe_model(run),
        "data": _describe_data(run),
        "software": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "directory": str(run.location),
    }
    return {name: value for name, value in facts.items() if value}


def _describe_start(run: RunRecord) -> str:
    """Return the date on which the run was first started, as far as its files tell."""
    times = [run.plan["started"]] if run.plan.get("started") else []
    if run.metrics:
        times.append(run.metrics[0]["time/unix"] - run.metrics[0]["time/step_s"])
    return f"{datetime.fromtimestamp(min(times), UTC):%Y-%m-%d %H:%M} UTC" if times else ""


def _describe_duration(run: RunRecord) -> str:
    """Return the duration of the run. Of several starts, only the time of their steps is known."""
    elapsed = compute_elapsed(run.metrics)[-1] if run.metrics else 0.0
    wall_s = run.result.get("wall_s") or 0.0
    if wall_s >= elapsed:
        return format_duration(wall_s) if wall_s else ""
    return f"{format_duration(elapsed)} from the first step to the last"


def _describe_hardware(run: RunRecord) -> str:
    """Return the devices of the last ranks, with their memory or CPU model, and the nodes."""
    if not run.workers:
        return ""
    devices = Counter(_describe_device(worker) for worker in run.workers)
    hosts = list(dict.fromkeys(str(worker["node"]) for worker in run.workers))
    where = f"on {', '.join(hosts)}" if len(hosts) <= _MAX_NAMED_HOSTS else f"on {len(hosts)} nodes"
    return ", ".join(f"{count} × {device}" for device, count in devices.items()) + f" {where}"


def _describe_device(worker: dict[str, Any]) -> str:
    if worker.get("device") == "cpu":
        return f"CPU worker ({worker['cpu']})" if worker.get("cpu") else "CPU worker"
    memory = f" ({worker['memory_gib']:.0f} GiB)" if worker.get("memory_gib") else ""
    return f"{worker.get('device')}{memory}"


def _describe_ranks(run: RunRecord) -> str:
    """Return the number of ranks, or its changes in the course of the run."""
    sizes = [f"{size:.0f}" for size, _ in groupby(value for _, value in run.get_points("elastic/world_size"))]
    if len(sizes) > _MAX_RANK_CHANGES:
        sizes = [*sizes[: _MAX_RANK_CHANGES // 2], "…", *sizes[-_MAX_RANK_CHANGES // 2 :]]
    return " → ".join(sizes) or str(run.plan.get("workers", ""))


def _describe_layout(run: RunRecord) -> str:
    """Return the planned mesh axes above 1, and the split of the batch."""
    names = ("dp_replicate", "dp_shard", "pp", "cp", "tp", "ep", "ulysses", "zero")
    layout = run.plan.get("layout", {})
    text = " ".join(f"{name}={layout[name]}" for name in names if layout.get(name, 0) > (name != "zero"))
    batching, seq_len = run.plan.get("microbatches"), run.config.get("train", {}).get("seq_len")
    if not layout or batching is None:
        return text
    microbatches = "1 microbatch" if batching["count"] == 1 else f"{batching['count']} microbatches"
    return f"{text or 'one rank'}; {microbatches} of {batching['size']} × {seq_len} tokens per step"


def _describe_model(run: RunRecord) -> str:
    plan, model, dtype = run.plan, run.config.get("model", {}), run.config.get("train", {}).get("dtype")
    if not plan or plan.get("flops_per_token") is None:
        return "given by the caller" if plan else ""
    count = f"{format_count(plan['parameters'])} parameters: " if plan.get("parameters") else ""
    experts = f", {model['num_experts']} experts" if model.get("num_experts") else ""
    shape = f"{model.get('num_layers')} layers, width {model.get('hidden_size')}, {model.get('num_heads')} heads"
    return f"{count}{shape}{experts}; {dtype}"


def _describe_data(run: RunRecord) -> str:
    data = run.config.get("data", {})
    return " + ".join(str(source.get("path")) for source in data.get("sources") or []) or str(data.get("path", ""))


def _get_median(run: RunRecord, key: str) -> float | None:
    values = sorted(value for _, value in run.get_points(key))
    return values[len(values) // 2] if values else None


def _format(value: float | None) -> str:
    return "" if value is None else format_number(value)
