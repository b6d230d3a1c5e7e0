"""What a run is doing, from its directory alone: for another shell, on any machine that sees it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.cli.options import one_line_errors
from raytrain_hpc.errors import RunDirectoryError
from raytrain_hpc.observability.console import format_duration, format_step_line
from raytrain_hpc.run_report.run_reader import RunRecord, read_run

_RATE_STEPS = 20  # of the last ones, from whose times the end is foretold


def format_status(run_dir: str | Path) -> Iterator[str]:
    """What it is, how far it is, what broke, what is saved. Raises RunDirectoryError where there is no run."""
    run = read_run(run_dir)
    yield f"{run.path}: {_describe_state(run)}"
    if run.workers:
        nodes = Counter(str(worker.get("host")) for worker in run.workers)
        where = ", ".join(f"{count} on {host}" for host, count in nodes.items())
        yield f"workers    {len(run.workers)}: {where}"
    if run.last_metrics:
        steps = int(run.config["train"]["steps"])
        seconds = sorted(line["time/step_s"] for line in run.metrics[-_RATE_STEPS:])
        left = (steps - run.last_metrics["step"]) * seconds[len(seconds) // 2]
        ago = format_duration(max(0.0, time.time() - run.last_metrics["time/unix"]))
        yield f"{format_step_line({'throughput/mfu': None, **run.last_metrics}, steps, None, left)}  ({ago} ago)"
    validation = run.get_points("val/loss")
    if validation:
        yield f"validation {validation[-1][1]:.4f} at step {validation[-1][0]:.0f}"
    if run.incidents:
        last = run.incidents[-1]
        rank = "" if last.get("rank") is None else f": rank {last['rank']}"
        recovered = last.get("recovered_s")
        after = "not recovered from" if recovered is None else f"next step after {recovered:.2f} s"
        yield f"incidents  {len(run.incidents)}, the last: {last['kind']}{rank} at step {last['step']}, {after}"
    saved = CheckpointStore(run.path / "checkpoints").list_steps()
    if saved:
        yield f"checkpoint step {saved[-1]} of {len(saved)} kept"


def _describe_state(run: RunRecord) -> str:
    try:
        Lease.check_available(run.path)
    except RunDirectoryError:
        return "under way"
    if run.result:
        return str(run.result["outcome"])
    return "not running; the same command goes on with it" if run.metrics else "not running, before its first step"


@click.command()
@click.argument("run_dir")
@one_line_errors
def status(run_dir: str) -> None:
    """Say what a run is doing, from another shell: how far it is, what broke, what is saved."""
    for line in format_status(run_dir):
        click.echo(line)
