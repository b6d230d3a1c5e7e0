"""`bench overhead`: what it costs to be ready for a fault that does not come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from raytrain_hpc.bench.contenders import launch_platform, log_progress
from raytrain_hpc.bench.idle_ray import idle_ray
from raytrain_hpc.bench.interleave import TrainingProcess, alternate
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.workloads import MEDIUM, make_settings

GOAL = 0.97
PAIRS_PER_ROUND = 8
WARMUP_STEPS = 4
STEPS = 1_000_000
WORKERS = 2
NO_FAULT_TOLERANCE = ("checkpoint.snapshot_every=0", "fault.compare_every=0")
LIVE_SNAPSHOTS = ("checkpoint.snapshot_every=1", "fault.compare_every=0")
REPLICA_CHECK = ("checkpoint.snapshot_every=1", "fault.compare_every=1")
FAULT_TOLERANCE = ("checkpoint.snapshot_every=1", "fault.compare_every=10")
_SAMPLE_S = 5.0


@dataclass(frozen=True)
class Case:
    """One row, or two: runs that differ in some settings, and the share of the first one's speed that is the goal.

    `every`: the second one does after every step what a run does every so many steps. In a turn of a few steps that
    would be in one or in none, and a median over them would not show it.
    """

    name: str
    baseline: tuple[str, ...]
    variant: tuple[str, ...]
    goal: float | None
    interval: int = 1


CASES = (
    Case("replicas: live state lent", NO_FAULT_TOLERANCE, LIVE_SNAPSHOTS, GOAL),
    Case("replicas compared", LIVE_SNAPSHOTS, REPLICA_CHECK, GOAL, interval=10),
    Case(
        "replicas compared, the agreed state kept",
        LIVE_SNAPSHOTS,
        (*REPLICA_CHECK, "fault.keep_agreed=true"),
        GOAL,
        interval=10,
    ),
    Case(
        "ZeRO-3: a snapshot every step, open to the other rank",
        (*NO_FAULT_TOLERANCE, "parallel.zero=3"),
        (*LIVE_SNAPSHOTS, "parallel.zero=3"),
        GOAL,
    ),
    Case("train.deterministic=elastic", NO_FAULT_TOLERANCE, (*NO_FAULT_TOLERANCE, "train.deterministic=elastic"), None),
)


def amortize(ratio: float, interval: int) -> float:
    """The ratio of rates where what costs `ratio` after every step is done every so many steps."""
    return 1 / (1 + (1 / ratio - 1) / interval)


def run(rounds: int) -> Table:
    """Let runs with and without take turns, `rounds` times eight each for every case."""
    table = Table(
        f"bench overhead: a run that is ready for faults beside one that is not, 25M parameters, {WORKERS} workers",
        ("with", "without s a step", "with s a step", "ratio of rates", "middle half", "turns", "goal", "met"),
    )
    with idle_ray(cpus=2 * WORKERS) as address:
        for case in CASES:
            _measure(case, rounds, address, table)
        shares = _measure_monitoring(address)
    table.add_row("watching: CPU share of a worker's heartbeat", None, shares[0], 1 - shares[0], None, None, GOAL, True)
    table.add_row("watching: CPU share of the agent", None, shares[1], 1 - shares[1], None, None, GOAL, True)
    for row in table.rows[-2:]:
        row["met"] = isinstance(share := row["with s a step"], float) and share <= 1 - GOAL
    table.notes += [
        "1,024 tokens a step, one thread a worker; both runs are alive together and take turns of some steps each; "
        "ratio: median over pairs of turns in a row",
        "heartbeats and agents cannot be switched off: their rows give the CPU time of their threads by that passed",
    ]
    return table


def _measure(case: Case, rounds: int, address: str, table: Table) -> None:
    arms = [
        [*make_settings((*MEDIUM, *words), WORKERS, STEPS)[0], f"cluster.address={address}", "data.engine=local"]
        for words in (case.baseline, case.variant)
    ]
    with launch_platform(arms[0], "the run without") as bare, launch_platform(arms[1], "the run with") as ready:
        times = alternate(bare, ready, rounds * PAIRS_PER_ROUND, WARMUP_STEPS)
    ratios = [without / having for without, having in times]
    (low, _, high), ratio, turns = quantiles(ratios, n=4), median(ratios), len(ratios)
    log_progress(f"{case.name}: {ratio:.3f} of {turns} pairs of turns")
    seconds = median(without for without, _ in times), median(having for _, having in times)
    name, goal = case.name, case.goal
    if case.interval > 1:
        table.add_row(f"{name} after every step", *seconds, ratio, [low, high], turns, None, None)
        low, ratio, high = (amortize(one, case.interval) for one in (low, ratio, high))
        name, seconds = f"{name} every {case.interval} steps, computed from that", (seconds[0], seconds[0] / ratio)
    met = None if goal is None else ratio >= goal
    table.add_row(name, *seconds, ratio, [low, high], turns, goal, met)


def _measure_monitoring(address: str) -> tuple[float, float]:
    """Shares of one CPU that a worker's heartbeat and the driver's agent take while training."""
    words = [
        *make_settings((*MEDIUM, *FAULT_TOLERANCE), WORKERS, STEPS)[0],
        f"cluster.address={address}",
        "data.engine=local",
    ]
    with launch_platform(words) as ours:
        ours.wait_for_steps(WARMUP_STEPS)
        before, began = _read_cpu_times(ours), time.monotonic()
        time.sleep(_SAMPLE_S)
        after, passed = _read_cpu_times(ours), time.monotonic() - began
    return (after[0] - before[0]) / passed, (after[1] - before[1]) / passed


def _read_cpu_times(ours: TrainingProcess) -> tuple[float, float]:
    return _read_thread_cpu_s(ours.read_worker_pids()[0], "heartbeat"), _read_thread_cpu_s(ours.process.pid, "watch")


def _read_thread_cpu_s(pid: int, name: str) -> float:
    """CPU seconds of the thread of this name. Raises LookupError where there is none."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if (thread / "comm").read_text().strip() == name:
            return int((thread / "schedstat").read_text().split()[0]) / 1e9
    raise LookupError(f"process {pid} has no thread {name}")
