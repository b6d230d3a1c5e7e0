"""`bench overhead`: what it costs to be ready for a fault that does not come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from raytrain_hpc.bench.contenders import platform, say
from raytrain_hpc.bench.idle_ray import idle_ray
from raytrain_hpc.bench.interleave import Contestant, alternate
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.workloads import MEDIUM, settings

GOAL = 0.97
PAIRS_A_ROUND = 8
WARMUP = 4
STEPS = 1_000_000
WORKERS = 2
BARE = ("checkpoint.snapshot_every=0", "fault.compare_every=0")
LENT = ("checkpoint.snapshot_every=1", "fault.compare_every=0")
COMPARED = ("checkpoint.snapshot_every=1", "fault.compare_every=1")
READY = ("checkpoint.snapshot_every=1", "fault.compare_every=10")
_LOOK_S = 5.0


@dataclass(frozen=True)
class Case:
    """One row, or two: runs that differ in some settings, and the share of the first one's speed that is the goal.

    `every`: the second one does after every step what a run does every so many steps. In a turn of a few steps that
    would be in one or in none, and a median over them would not show it.
    """

    name: str
    without: tuple[str, ...]
    having: tuple[str, ...]
    goal: float | None
    every: int = 1


CASES = (
    Case("replicas: live state lent", BARE, LENT, GOAL),
    Case("replicas compared", LENT, COMPARED, GOAL, every=10),
    Case("replicas compared, the agreed state kept", LENT, (*COMPARED, "fault.keep_agreed=true"), GOAL, every=10),
    Case(
        "ZeRO-3: a snapshot every step, open to the other rank",
        (*BARE, "parallel.zero=3"),
        (*LENT, "parallel.zero=3"),
        GOAL,
    ),
    Case("train.deterministic=elastic", BARE, (*BARE, "train.deterministic=elastic"), None),
)


def spread(ratio: float, every: int) -> float:
    """The ratio of rates where what costs `ratio` after every step is done every so many steps."""
    return 1 / (1 + (1 / ratio - 1) / every)


def run(rounds: int) -> Table:
    """Let runs with and without take turns, `rounds` times eight each for every case."""
    table = Table(
        f"bench overhead: a run that is ready for faults beside one that is not, 25M parameters, {WORKERS} workers",
        ("with", "without s a step", "with s a step", "ratio of rates", "middle half", "turns", "goal", "met"),
    )
    with idle_ray(cpus=2 * WORKERS) as address:
        for case in CASES:
            _measure(case, rounds, address, table)
        shares = _watching(address)
    table.add("watching: CPU share of a worker's heartbeat", None, shares[0], 1 - shares[0], None, None, GOAL, True)
    table.add("watching: CPU share of the agent", None, shares[1], 1 - shares[1], None, None, GOAL, True)
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
        [*settings((*MEDIUM, *words), WORKERS, STEPS)[0], f"cluster.address={address}", "data.engine=local"]
        for words in (case.without, case.having)
    ]
    with platform(arms[0], "the run without") as bare, platform(arms[1], "the run with") as ready:
        times = alternate(bare, ready, rounds * PAIRS_A_ROUND, WARMUP)
    ratios = [without / having for without, having in times]
    (low, _, high), ratio, turns = quantiles(ratios, n=4), median(ratios), len(ratios)
    say(f"{case.name}: {ratio:.3f} of {turns} pairs of turns")
    seconds = median(without for without, _ in times), median(having for _, having in times)
    name, goal = case.name, case.goal
    if case.every > 1:
        table.add(f"{name} after every step", *seconds, ratio, [low, high], turns, None, None)
        low, ratio, high = (spread(one, case.every) for one in (low, ratio, high))
        name, seconds = f"{name} every {case.every} steps, computed from that", (seconds[0], seconds[0] / ratio)
    met = None if goal is None else ratio >= goal
    table.add(name, *seconds, ratio, [low, high], turns, goal, met)


def _watching(address: str) -> tuple[float, float]:
    """Shares of one CPU that a worker's heartbeat and the driver's agent take while training."""
    words = [*settings((*MEDIUM, *READY), WORKERS, STEPS)[0], f"cluster.address={address}", "data.engine=local"]
    with platform(words) as ours:
        ours.until_steps(WARMUP)
        before, began = _cpu_s(ours), time.monotonic()
        time.sleep(_LOOK_S)
        after, passed = _cpu_s(ours), time.monotonic() - began
    return (after[0] - before[0]) / passed, (after[1] - before[1]) / passed


def _cpu_s(ours: Contestant) -> tuple[float, float]:
    return _thread_s(ours.workers()[0], "heartbeat"), _thread_s(ours.process.pid, "watch")


def _thread_s(pid: int, name: str) -> float:
    """CPU seconds of the thread of this name. Raises LookupError where there is none."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if (thread / "comm").read_text().strip() == name:
            return int((thread / "schedstat").read_text().split()[0]) / 1e9
    raise LookupError(f"process {pid} has no thread {name}")
