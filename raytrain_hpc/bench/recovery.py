"""`bench recovery`: a rank is killed, or frozen, beside Ray Train and torchrun with the same model."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from raytrain_hpc.bench import restart_baseline
from raytrain_hpc.bench.contenders import log_progress, read_jsonl, scratch_dir
from raytrain_hpc.bench.interleave import TrainingProcess, launch_training
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.startup import check_ray_train
from raytrain_hpc.bench.workloads import SMALL, build_baseline_job, make_settings

WORKERS = 2
STEPS = 1_000_000
FAULT_STEP = 27  # steps: seven beyond the peers' last checkpoint
TIMEOUT_S = 60.0
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
GOALS_S = {"SIGKILL": 0.8, "SIGSTOP": 1.5}  # of the platform, detection and all
OVERRIDES = (*SMALL, "data.path=synthetic")


@dataclass(frozen=True)
class SystemRun:
    """A training under one of the systems; `lines` has "step" and "time/unix" of its steps so far."""

    process: TrainingProcess
    read_steps: Callable[[], list[dict[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """Seconds from the fault to the next step, and steps that were trained again; None where none came in time."""

    seconds: float | None
    steps_lost: int | None


def run(rounds: int) -> Table:
    """Each system struck by each fault, `rounds` times in turns."""
    check_ray_train()
    arms = {
        "platform": lambda: _start_platform(),
        "platform, a spare": lambda: _start_platform("cluster.spares=1"),
        "Ray Train": _start_ray_train,
        "torchrun": _start_torchrun,
    }
    found: dict[tuple[str, str], list[Outcome]] = {}
    for _ in range(rounds):
        for fault, number in FAULTS.items():
            for name, start in arms.items():
                with start() as arm:
                    outcome = _measure_recovery(arm, number)
                log_progress(f"{fault}, {name}: {outcome}")
                found.setdefault((fault, name), []).append(outcome)
    table = Table(
        f"bench recovery: one of {WORKERS} ranks is struck; seconds to the next step",
        ("fault", "system", "seconds", "each", "steps lost", "goal", "met"),
    )
    for (fault, name), outcomes in found.items():
        seconds = [one.seconds for one in outcomes if one.seconds is not None]
        lost = [one.steps_lost for one in outcomes if one.steps_lost is not None]
        all_came = len(seconds) == len(outcomes)
        goal = GOALS_S[fault] if name.startswith("platform") else None
        table.add_row(
            fault,
            name,
            median(seconds) if all_came else f"more than {TIMEOUT_S:.0f}",
            seconds,
            max(lost, default=None),
            goal,
            None if goal is None else all_came and median(seconds) <= goal,
        )
    table.notes += [
        f"the quickstart's model; rank 1 is struck after step {FAULT_STEP}; Ray Train (FailureConfig) and torchrun "
        f"(--max-restarts) save every {restart_baseline.CHECKPOINT_INTERVAL} steps and start all workers again from there",
        f"a system is given up on {TIMEOUT_S:.0f} s after the fault",
    ]
    return table


def _measure_recovery(arm: SystemRun, number: signal.Signals) -> Outcome:
    one = arm.process
    one.wait_for_steps(FAULT_STEP)
    victim, struck = one.read_worker_pids()[1], time.time()
    os.kill(victim, number)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        lines = arm.read_steps()
        last = [line for line in lines if line["time/unix"] <= struck][-1]
        for line in lines:
            if line["time/unix"] > struck and _is_recovered(line, last):
                return Outcome(line["time/unix"] - struck, max(0, last["step"] - line["step"] + 1))
        time.sleep(0.02)
    return Outcome(None, None)


def _is_recovered(line: dict[str, Any], last: dict[str, Any]) -> bool:
    """Whether a step is one after the recovery, and not one that was nearly done when the fault struck."""
    generation = "elastic/generation"
    return bool(line["step"] <= last["step"] or line.get(generation, 0) > last.get(generation, 0))


@contextmanager
def _start_platform(*words: str) -> Iterator[SystemRun]:
    with scratch_dir() as directory:
        run_dir = directory / "run"
        line, _ = make_settings((*OVERRIDES, *words), WORKERS, STEPS)
        command = [sys.executable, "-m", "raytrain_hpc", "train", *line, f"run.dir={run_dir}", "cluster.address=local"]
        with _start_system(
            "the platform", command, {"RAY_TMPDIR": str(directory)}, directory, run_dir / "metrics.jsonl"
        ) as arm:
            yield arm


@contextmanager
def _start_ray_train() -> Iterator[SystemRun]:
    with _job_dir() as (directory, described):
        slots = str(max(os.cpu_count() or 1, WORKERS + 1))
        command = [sys.executable, restart_baseline.__file__, str(described), str(directory), "ray-train"]
        environment = {"RAY_TMPDIR": str(directory)}
        with _start_system(
            "Ray Train", [*command, str(WORKERS), slots], environment, directory, directory / "steps.jsonl"
        ) as arm:
            yield arm


@contextmanager
def _start_torchrun() -> Iterator[SystemRun]:
    with _job_dir() as (directory, described):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=3", f"--nproc-per-node={WORKERS}"]
        command = [sys.executable, *launcher, restart_baseline.__file__, str(described), str(directory)]
        # By default workers that are started again share a store with those before, and gloo's new ranks now and then
        # take the address of a dead one from it: then torchrun starts them in vain, or they hang.
        environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with _start_system("torchrun", command, environment, directory, directory / "steps.jsonl") as arm:
            yield arm


@contextmanager
def _job_dir() -> Iterator[tuple[Path, Path]]:
    with scratch_dir() as directory:
        _, config = make_settings(OVERRIDES, WORKERS, STEPS)
        described = directory / "job.json"
        described.write_text(json.dumps(build_baseline_job(config, WORKERS, directory).to_json()))
        yield directory, described


@contextmanager
def _start_system(
    name: str, command: list[str], environment: dict[str, str], directory: Path, steps: Path
) -> Iterator[SystemRun]:
    def pids() -> list[int]:
        listed = steps.with_name("workers.json")
        if listed.exists():
            return [worker["pid"] for worker in json.loads(listed.read_text())["workers"]]
        return [int(path.read_text() or 0) for path in sorted(steps.parent.glob("[0-9].pid"))]

    def lines() -> list[dict[str, Any]]:
        return read_jsonl(steps)

    commits = lambda: [line["time/unix"] for line in lines()]  # noqa: E731
    with launch_training(name, command, environment, directory / "output", commits, pids) as one:
        yield SystemRun(one, lines)
