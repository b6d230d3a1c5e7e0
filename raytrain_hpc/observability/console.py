"""Console output of a run: log lines and, on a terminal, a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raytrain_hpc.observability.metrics import compute_mean_rates

# Kinds of incidents that do not read as a predicate of a rank.
_PREDICATES = {
    "node lost": "lost with the node",
    "link down": "cut off from the network",
    "faulty device": "found to compute wrong",
    "suspected": "suspected to compute wrong",
    "silent corruption": "computed wrong once",
    "preempted": "preempted with the node",
    "out of memory": "ran out of memory",
    "interpreter held": "held the interpreter lock",
    "replicas differ": "found different from other replicas",
}


def format_count(value: float) -> str:
    """Format a number with 3 significant digits: 412345 -> "412k"."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Format a duration: 4320 -> "1h12m"."""
    total = int(seconds)
    if total >= 3600:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 60}m{total % 60:02d}s" if total >= 60 else f"{total}s"


def format_step_line(
    metrics: dict[str, Any], recent_steps: Sequence[Mapping[str, Any]], steps: int, device_gib: float | None
) -> str:
    """Format the log line of a step: loss, learning rate, gradient norm, throughput, MFU, memory and remaining time.

    Throughput and MFU are means over `recent_steps`, the metrics of the steps since the last line; if empty, those
    of the step itself. `steps`: number of steps of the run.
    """
    metrics = metrics | compute_mean_rates(recent_steps)
    seconds_left = (steps - metrics["step"]) * metrics["time/step_s"]
    parts = [
        f"step {metrics['step']}/{steps}",
        f"loss {metrics['train/loss']:.3f}",
        f"lr {metrics['train/lr']:.1e}".replace("e-0", "e-"),
        f"gnorm {metrics['train/grad_norm']:.2f}",
        f"tok/s {format_count(metrics['throughput/tokens_per_sec'])}",
    ]
    if metrics["elastic/world_size"] > 1:
        parts[-1] += f" ({format_count(metrics['throughput/tokens_per_sec_per_device'])}/worker)"
    if metrics.get("throughput/mfu") is not None:
        parts.append(f"mfu {100 * metrics['throughput/mfu']:.1f}%")
    percent_text = f" {100 * metrics['memory/peak_gib'] / device_gib:.0f}%" if device_gib else ""
    parts.append(f"mem {metrics['memory/peak_gib']:.2f}GiB{percent_text}")
    parts.append(f"eta {format_duration(seconds_left)}")
    if "val/loss" in metrics:
        parts.append(f"val {metrics['val/loss']:.4f}")
    return "  ".join(parts)


def format_incident(incident: Mapping[str, Any]) -> str:
    """Format what happened to which rank at which step: "rank 1 died at step 12"."""
    ranks = incident.get("ranks") or ([] if incident.get("rank") is None else [incident["rank"]])
    subject = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} " if ranks else ""
    kind = str(incident["kind"])
    return f"{subject}{_PREDICATES.get(kind, kind)} at step {incident['step'] + 1}"


def format_recovery(incident: Mapping[str, Any], *, verbose: bool = False) -> str:
    """Format a completed incident: "rank 1 died at step 12; recovered in 0.41 s on 1 of 2 workers, 0 steps lost".

    With `verbose`, the seconds of each phase follow.
    """
    phases = f" ({format_phases(incident['phases'])})" if verbose else ""
    return (
        f"{format_incident(incident)}; recovered in {incident['recovered_s']:.2f} s{phases} on "
        f"{incident['world_after']} of {incident['world']} workers, {incident['steps_lost']} steps lost"
    )


def format_phases(phases: Mapping[str, float | None]) -> str:
    """Format the seconds of each phase of a recovery that is known: "detect 0.05, abort 0.02"."""
    return ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items() if seconds is not None)


class Console:
    """Printer of log lines, above a progress bar if the output is a terminal. With `quiet`, it prints nothing."""

    def __init__(self, *, quiet: bool = False):
        self._rich = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet)
        self._progress: Progress | None = None
        self._task: Any = None

    def print_line(self, text: str) -> None:
        """Print a line and flush."""
        self._rich.print(text, markup=False)
        self._rich.file.flush()

    def print_notice(self, text: str) -> None:
        """Print a line about the progress of the start or the end of the run to stderr, and flush."""
        if not self._rich.quiet:
            print(text, file=sys.stderr, flush=True)  # rich puts it above the progress bar

    def start_progress(self, steps: int, done: int) -> None:
        """Show the progress bar, on a terminal, with `done` of `steps` steps completed. Replaces an earlier one."""
        self.stop_progress()
        if self._rich.is_terminal and not self._rich.quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._rich, transient=True)
            self._progress.start()
            self._task = self._progress.add_task("training", total=steps, completed=done)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def stop_progress(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
