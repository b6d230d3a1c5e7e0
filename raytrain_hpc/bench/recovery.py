"""`bench recovery`: time to recover from a killed, frozen or failing rank, or to grow, compared with other systems."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from raytrain_hpc.bench import restart_baseline
from raytrain_hpc.bench.contenders import log_progress, read_jsonl
from raytrain_hpc.bench.growth import GROWTH, wait_for_growth
from raytrain_hpc.bench.recovery_systems import (
    DEFAULT_PEERS,
    PLATFORM,
    WORKERS,
    InjectedException,
    SystemRun,
    can_grow,
    check_systems,
    list_systems,
    start_system,
)
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.observability.console import format_phases

FaultName = Literal["SIGKILL", "SIGSTOP", "exception", "growth, 1 to 2 ranks"]
FAULTS: tuple[FaultName, ...] = ("SIGKILL", "SIGSTOP", "exception")
# With detection, on CPUs:
GOALS_S: dict[FaultName, float] = {"SIGKILL": 0.8, "SIGSTOP": 1.5, "exception": 0.8, GROWTH: 0.8}
FAULTY_RANK = 1
FAULT_STEP = 27  # seven steps after the last checkpoint of the peers
COMPARED_STEPS = 40  # whose losses are compared with those of a run without faults
TIMEOUT_S = 150.0
_RECORD_TIMEOUT_S = 2.0  # from the first step after a fault to its record


@dataclass(frozen=True)
class Outcome:
    """Seconds from the fault to the next step, and the number of repeated steps; None after a timeout.

    `losses`: the last loss of each step. `phases`: seconds of each phase of the recovery, if the system records them.
    """

    seconds: float | None
    steps_lost: int | None
    losses: dict[int, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)


def run(rounds: int, against: Sequence[str] = DEFAULT_PEERS, pythons: Mapping[str, str] | None = None) -> Table:
    """Inject each fault into each system, alternating, for `rounds` rounds.

    `pythons`: other interpreters for some of the peers.
    """
    pythons = pythons or {}
    check_systems(against, pythons)
    outcomes_by_case: dict[tuple[FaultName, str], list[Outcome]] = {}
    references: dict[str, dict[int, float]] = {}
    for _ in range(rounds):
        for name in list_systems(against):
            python = pythons.get(name.partition(",")[0], sys.executable)
            if name not in references:
                references[name] = _train_undisturbed(name, python)
            for fault in FAULTS:
                exception = InjectedException(FAULTY_RANK, FAULT_STEP) if fault == "exception" else None
                with start_system(name, python, exception) as system_run:
                    outcome = _measure_recovery(system_run, fault)
                log_progress(f"{fault}, {name}: {outcome.seconds} s, {outcome.steps_lost} steps lost")
                outcomes_by_case.setdefault((fault, name), []).append(outcome)
            if can_grow(name):
                with start_system(name, python, None, grows=True) as system_run:
                    outcome = _measure_growth(system_run)
                log_progress(f"{GROWTH}, {name}: {outcome.seconds} s, {outcome.steps_lost} steps lost")
                outcomes_by_case.setdefault((GROWTH, name), []).append(outcome)
    return _make_table(outcomes_by_case, references)


def _make_table(
    outcomes_by_case: Mapping[tuple[FaultName, str], Sequence[Outcome]], references: Mapping[str, Mapping[int, float]]
) -> Table:
    table = Table(
        f"bench recovery: a fault in one of {WORKERS} ranks; seconds to the next step",
        ("fault", "system", "seconds", "each", "steps lost", "losses", "goal", "met"),
    )
    order = (*FAULTS, GROWTH)
    for (fault, name), outcomes in sorted(outcomes_by_case.items(), key=lambda item: order.index(item[0][0])):
        seconds = [result.seconds for result in outcomes if result.seconds is not None]
        steps_lost = [result.steps_lost for result in outcomes if result.steps_lost is not None]
        all_recovered = len(seconds) == len(outcomes)
        goal = GOALS_S[fault] if name.startswith(PLATFORM) else None
        table.add_row(
            fault,
            name,
            median(seconds) if all_recovered else f"more than {TIMEOUT_S:.0f}",
            seconds,
            max(steps_lost, default=None),
            describe_losses([outcome.losses for outcome in outcomes], references[name]) if all_recovered else None,
            goal,
            None if goal is None else all_recovered and median(seconds) <= goal,
        )
        if phases := _compute_median_phases(outcomes):
            table.notes.append(f"{fault}, {name}, medians of its phases in seconds: {format_phases(phases)}")
    table.notes += [
        f"the quickstart's model; rank {FAULTY_RANK} gets the fault after step {FAULT_STEP}; systems that restart from "
        f"checkpoints save every {restart_baseline.CHECKPOINT_INTERVAL} steps",
        f"losses: of steps 1 to {COMPARED_STEPS}, against a run of the same system without a fault; the platform with "
        "train.deterministic=elastic",
        f"the measurement times out {TIMEOUT_S:.0f} s after the fault",
        f"{GROWTH}: the longest time between two steps, from the request to four steps on two ranks; not measured for "
        "systems that are not listed with it",
    ]
    return table


def describe_losses(runs: Sequence[Mapping[int, float]], reference: Mapping[int, float]) -> str:
    """Return whether runs with a fault have the losses of one without: bit for bit, or the largest difference."""
    differences = [abs(losses[step] - loss) / abs(loss) for losses in runs for step, loss in reference.items()]
    return "same bits" if max(differences) == 0 else f"up to {max(differences):.1e} apart"


def _train_undisturbed(name: str, python: str) -> dict[int, float]:
    """Return the losses of the compared steps without a fault."""
    with start_system(name, python, None) as system_run:
        system_run.process.wait_for_steps(COMPARED_STEPS)
        return _read_losses(system_run)


def _read_losses(system_run: SystemRun) -> dict[int, float]:
    losses = {line["step"]: line["train/loss"] for line in system_run.read_steps()}
    return {step: loss for step, loss in losses.items() if step <= COMPARED_STEPS}


def _measure_recovery(system_run: SystemRun, fault: FaultName) -> Outcome:
    fault_time = _strike(system_run, fault)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        steps = system_run.read_steps()
        last_step = [step for step in steps if step["time/unix"] <= fault_time][-1]
        for step in steps:
            if step["time/unix"] > fault_time and _is_recovered(step, last_step):
                steps_lost = max(0, last_step["step"] - step["step"] + 1)
                phases = _read_phases(system_run.incidents)
                _wait_for_step(system_run, COMPARED_STEPS, deadline)
                return Outcome(step["time/unix"] - fault_time, steps_lost, _read_losses(system_run), phases)
        time.sleep(0.02)
    return Outcome(None, None)


def _measure_growth(system_run: SystemRun) -> Outcome:
    system_run.process.wait_for_steps(FAULT_STEP)
    requested = time.time()
    system_run.grow()
    found = wait_for_growth(system_run.read_steps, requested, TIMEOUT_S)
    if found is None:
        return Outcome(None, None)
    pause_s, joined_s, repeated = found
    _wait_for_step(system_run, COMPARED_STEPS, time.monotonic() + TIMEOUT_S)
    return Outcome(pause_s, repeated, _read_losses(system_run), {"from request to the first step": joined_s})


def _strike(system_run: SystemRun, fault: FaultName) -> float:
    """Let the faulty rank have its fault, and return the Unix time of it."""
    process = system_run.process
    if fault == "exception":  # it was requested before the start
        process.wait_for_steps(FAULT_STEP)
        while not system_run.raised.exists():
            time.sleep(0.005)
        return system_run.raised.stat().st_mtime
    process.wait_for_steps(FAULT_STEP)
    pid, fault_time = process.read_worker_pids()[FAULTY_RANK], time.time()
    os.kill(pid, signal.SIGKILL if fault == "SIGKILL" else signal.SIGSTOP)
    return fault_time


def _wait_for_step(system_run: SystemRun, count: int, deadline: float) -> None:
    while system_run.read_steps()[-1]["step"] < count and time.monotonic() < deadline:
        time.sleep(0.02)


def _read_phases(incidents: Path) -> dict[str, float]:
    """Return the phases of the last recovery, which is recorded just after its first step."""
    deadline = time.monotonic() + _RECORD_TIMEOUT_S
    while incidents.exists() and time.monotonic() < deadline:
        phases: dict[str, float] = read_jsonl(incidents)[-1]["phases"]
        if "first step" in phases:
            return phases
        time.sleep(0.02)
    return {}


def _compute_median_phases(outcomes: Sequence[Outcome]) -> dict[str, float]:
    recorded = [outcome.phases for outcome in outcomes if outcome.phases]
    return {phase: median(phases[phase] for phases in recorded) for phase in (recorded[0] if recorded else ())}


def _is_recovered(step: dict[str, Any], last_step: dict[str, Any]) -> bool:
    """Return whether a step was computed after the recovery, and not already in progress at the fault."""
    generation = "elastic/generation"
    return bool(step["step"] <= last_step["step"] or step[generation] > last_step[generation])
