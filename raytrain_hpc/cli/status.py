"""`raytrain-hpc status`: the state of a run, read from its directory on any machine that mounts it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.cli.options import print_errors_on_one_line
from raytrain_hpc.errors import RunDirectoryError
from raytrain_hpc.observability.console import format_duration, format_incident, format_step_line
from raytrain_hpc.run_report.run_reader import RunRecord, read_run

_RATE_STEPS = 20  # most recent steps, over which throughput is averaged


def format_status(run_dir: str | Path) -> Iterator[str]:
    """Yield lines with the state of a run, its progress, incidents and checkpoints.

    Raises:
        RunDirectoryError: The directory holds no run.
    """
    run = read_run(run_dir)
    state = _describe_state(run)
    yield f"{run.location}: {state}"
    if run.workers:
        nodes = Counter(str(worker["node"]) for worker in run.workers)
        placement = ", ".join(f"{count} on {node}" for node, count in nodes.items())
        others = f"; {run.preferred_run} has other devices" if run.preferred_run and state == "running" else ""
        yield f"workers    {len(run.workers)}: {placement}{others}"
    if run.last_metrics:
        steps = int(run.config["train"]["steps"])
        age = format_duration(max(0.0, time.time() - run.last_metrics["time/unix"]))
        yield f"{format_step_line(run.last_metrics, run.metrics[-_RATE_STEPS:], steps, None)}  ({age} ago)"
    validation = run.get_points("val/loss")
    if validation:
        yield f"validation {validation[-1][1]:.4f} at step {validation[-1][0]:.0f}"
    if run.incidents:
        last = run.incidents[-1]
        recovered = last.get("recovered_s")
        recovery = "not recovered" if recovered is None else f"recovered in {recovered:.2f} s"
        yield f"incidents  {len(run.incidents)}; last: {format_incident(last)}, {recovery}"
    saved_steps = CheckpointStore(run.location / "checkpoints").list_steps()
    if saved_steps:
        yield f"checkpoint step {saved_steps[-1]}, newest of {len(saved_steps)} kept"


def _describe_state(run: RunRecord) -> str:
    try:
        Lease.check_available(run.location)
    except RunDirectoryError:
        return "running"
    if run.result:
        return str(run.result["outcome"])
    if not run.metrics:
        return "not running; no step committed yet"
    is_local = bool(run.config.get("checkpoint", {}).get("local_dir"))  # on nodes, which cannot be seen from here
    if not is_local and not CheckpointStore(run.location / "checkpoints").list_steps():
        return "not running; without a checkpoint, the same command starts again at the first step"
    return "not running; repeat the same command to resume"


@click.command()
@click.argument("run_dir")
@print_errors_on_one_line
def status(run_dir: str) -> None:
    """Show the state of a run from another shell: progress, incidents, checkpoints."""
    for line in format_status(run_dir):
        click.echo(line)
