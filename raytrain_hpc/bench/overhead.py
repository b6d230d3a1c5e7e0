"""`bench overhead`: overhead of fault tolerance when nothing fails."""

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
from raytrain_hpc.elastic.audit_schedule import choose_interval

GOAL = 0.97
PAIRS_PER_ROUND = 8
WARMUP_STEPS = 4
STEPS = 1_000_000
WORKERS = 2
NO_FAULT_TOLERANCE = ("checkpoint.snapshot_interval=0", "fault.replica_check_interval=0")
LIVE_SNAPSHOTS = ("checkpoint.snapshot_interval=1", "fault.replica_check_interval=0")
REPLICA_CHECK = ("checkpoint.snapshot_interval=1", "fault.replica_check_interval=1")
FAULT_TOLERANCE = ("checkpoint.snapshot_interval=1", "fault.replica_check_interval=10")
AUTO_AUDIT_INTERVAL = choose_interval("auto", [range(1)])  # of ranks with one microbatch, as here
_SAMPLE_S = 5.0


@dataclass(frozen=True)
class Case:
    """Two runs that differ in some settings. `goal`: minimum ratio of the variant's speed to the baseline's.

    `interval`: a real run uses the feature every `interval` steps, but the variant uses it after every step. A turn has
    only a few steps, and their median would miss a feature that is used less often. The table then has a second row
    with the ratio computed for the interval.
    """

    name: str
    baseline: tuple[str, ...]
    variant: tuple[str, ...]
    goal: float
    interval: int = 1


CASES = (
    Case("replicas: live state published", NO_FAULT_TOLERANCE, LIVE_SNAPSHOTS, GOAL),
    Case("replicas compared", LIVE_SNAPSHOTS, REPLICA_CHECK, GOAL, interval=10),
    Case(
        "replicas compared, verified state kept",
        LIVE_SNAPSHOTS,
        (*REPLICA_CHECK, "fault.keep_verified_state=true"),
        GOAL,
        interval=10,
    ),
    Case(
        "ZeRO-3: a snapshot every step, in shared memory",
        (*NO_FAULT_TOLERANCE, "parallel.zero=3"),
        (*LIVE_SNAPSHOTS, "parallel.zero=3"),
        GOAL,
    ),
    Case(
        "audits, over train.deterministic=elastic,",
        (*NO_FAULT_TOLERANCE, "train.deterministic=elastic"),
        (*NO_FAULT_TOLERANCE, "train.deterministic=elastic", "fault.audit_interval=1"),
        0.99,
        interval=AUTO_AUDIT_INTERVAL,
    ),
    Case("train.deterministic=elastic", NO_FAULT_TOLERANCE, (*NO_FAULT_TOLERANCE, "train.deterministic=elastic"), 0.95),
)


def amortize(ratio: float, interval: int) -> float:
    """Convert the ratio of rates of a feature used after every step to its use every `interval` steps."""
    return 1 / (1 + (1 / ratio - 1) / interval)


def run(rounds: int) -> Table:
    """Alternate runs with and without each feature, `rounds` times eight turns each."""
    table = Table(
        f"bench overhead: runs with and without a fault-tolerance feature, 25M parameters, {WORKERS} workers",
        ("feature", "without s per step", "with s per step", "ratio of rates", "middle half", "turns", "goal", "met"),
    )
    with idle_ray(cpus=2 * WORKERS) as address:
        for case in CASES:
            _measure(case, rounds, address, table)
        cpu_shares = _measure_monitoring(address)
    table.add_row(
        "monitoring: CPU share of a worker's heartbeat", None, cpu_shares[0], 1 - cpu_shares[0], None, None, GOAL, True
    )
    table.add_row(
        "monitoring: CPU share of the node agent", None, cpu_shares[1], 1 - cpu_shares[1], None, None, GOAL, True
    )
    for row in table.rows[-2:]:
        row["met"] = isinstance(cpu_share := row["with s per step"], float) and cpu_share <= 1 - GOAL
    table.notes += [
        "1,024 tokens per step, one thread per worker; both runs are started and alternate in turns of a few steps; "
        "ratio: median over pairs of consecutive turns; middle half: its quartiles",
        "heartbeats and agents cannot be switched off: their rows give the CPU time of their threads per wall time",
    ]
    return table


def _measure(case: Case, rounds: int, address: str, table: Table) -> None:
    runs = [
        [*make_settings((*MEDIUM, *overrides), WORKERS, STEPS)[0], f"cluster.address={address}", "data.engine=local"]
        for overrides in (case.baseline, case.variant)
    ]
    with (
        launch_platform(runs[0], "the run without the feature") as baseline,
        launch_platform(runs[1], "the run with the feature") as variant,
    ):
        times = alternate(baseline, variant, rounds * PAIRS_PER_ROUND, WARMUP_STEPS)
    ratios = [baseline_s / variant_s for baseline_s, variant_s in times]
    (low, _, high), ratio, turns = quantiles(ratios, n=4), median(ratios), len(ratios)
    log_progress(f"{case.name}: {ratio:.3f} of {turns} pairs of turns")
    seconds = median(baseline_s for baseline_s, _ in times), median(variant_s for _, variant_s in times)
    name, goal = case.name, case.goal
    if case.interval > 1:
        table.add_row(f"{name} after every step", *seconds, ratio, [low, high], turns, None, None)
        low, ratio, high = (amortize(value, case.interval) for value in (low, ratio, high))
        name, seconds = f"{name} every {case.interval} steps, computed from that", (seconds[0], seconds[0] / ratio)
    table.add_row(name, *seconds, ratio, [low, high], turns, goal, ratio >= goal)


def _measure_monitoring(address: str) -> tuple[float, float]:
    """Measure the shares of one CPU that a worker's heartbeat and the node agent take during training."""
    overrides = [
        *make_settings((*MEDIUM, *FAULT_TOLERANCE), WORKERS, STEPS)[0],
        f"cluster.address={address}",
        "data.engine=local",
    ]
    with launch_platform(overrides) as training:
        training.wait_for_steps(WARMUP_STEPS)
        before, start = _read_cpu_times(training), time.monotonic()
        time.sleep(_SAMPLE_S)
        after, elapsed = _read_cpu_times(training), time.monotonic() - start
    return (after[0] - before[0]) / elapsed, (after[1] - before[1]) / elapsed


def _read_cpu_times(training: TrainingProcess) -> tuple[float, float]:
    return _read_thread_cpu_s(training.read_worker_pids()[0], "heartbeat"), _read_thread_cpu_s(
        training.process.pid, "watch"
    )


def _read_thread_cpu_s(pid: int, name: str) -> float:
    """Read the CPU seconds of a thread by name.

    Raises:
        LookupError: The process has no thread of this name.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if (thread / "comm").read_text().strip() == name:
            return int((thread / "schedstat").read_text().split()[0]) / 1e9
    raise LookupError(f"process {pid} has no thread {name}")
