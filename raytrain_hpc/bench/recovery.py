"""`bench recovery`: time to recover from a killed or frozen rank, compared with Ray Train and torchrun."""

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
from raytrain_hpc.cpu_limits import count_usable_cpus

WORKERS = 2
STEPS = 1_000_000
FAULT_STEP = 27  # seven steps after the last checkpoint of the peers
TIMEOUT_S = 60.0
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
GOALS_S = {"SIGKILL": 0.8, "SIGSTOP": 1.5}  # for the platform, including detection
OVERRIDES = (*SMALL, "data.path=synthetic")


@dataclass(frozen=True)
class SystemRun:
    """A run under one of the systems. `read_steps` returns "step" and "time/unix" of its steps so far."""

    process: TrainingProcess
    read_steps: Callable[[], list[dict[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """Seconds from the fault to the next step, and the number of repeated steps; None after a timeout."""

    seconds: float | None
    steps_lost: int | None


def run(rounds: int) -> Table:
    """Inject each fault into each system, alternating, for `rounds` rounds."""
    check_ray_train()
    systems = {
        "platform": lambda: _start_platform(),
        "platform, one spare": lambda: _start_platform("cluster.spares=1"),
        "Ray Train": _start_ray_train,
        "torchrun": _start_torchrun,
    }
    outcomes_by_case: dict[tuple[str, str], list[Outcome]] = {}
    for _ in range(rounds):
        for fault, signal_number in FAULTS.items():
            for name, start in systems.items():
                with start() as system_run:
                    outcome = _measure_recovery(system_run, signal_number)
                log_progress(f"{fault}, {name}: {outcome}")
                outcomes_by_case.setdefault((fault, name), []).append(outcome)
    table = Table(
        f"bench recovery: a fault in one of {WORKERS} ranks; seconds to the next step",
        ("fault", "system", "seconds", "each", "steps lost", "goal", "met"),
    )
    for (fault, name), outcomes in outcomes_by_case.items():
        seconds = [result.seconds for result in outcomes if result.seconds is not None]
        steps_lost = [result.steps_lost for result in outcomes if result.steps_lost is not None]
        all_recovered = len(seconds) == len(outcomes)
        goal = GOALS_S[fault] if name.startswith("platform") else None
        table.add_row(
            fault,
            name,
            median(seconds) if all_recovered else f"more than {TIMEOUT_S:.0f}",
            seconds,
            max(steps_lost, default=None),
            goal,
            None if goal is None else all_recovered and median(seconds) <= goal,
        )
    table.notes += [
        f"the quickstart's model; rank 1 gets the fault after step {FAULT_STEP}; Ray Train (FailureConfig) and "
        f"torchrun (--max-restarts) save every {restart_baseline.CHECKPOINT_INTERVAL} steps and restart all workers "
        "from the checkpoint",
        f"the measurement times out {TIMEOUT_S:.0f} s after the fault",
    ]
    return table


def _measure_recovery(system_run: SystemRun, signal_number: signal.Signals) -> Outcome:
    process = system_run.process
    process.wait_for_steps(FAULT_STEP)
    pid, fault_time = process.read_worker_pids()[1], time.time()
    os.kill(pid, signal_number)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        steps = system_run.read_steps()
        last_step = [step for step in steps if step["time/unix"] <= fault_time][-1]
        for step in steps:
            if step["time/unix"] > fault_time and _is_recovered(step, last_step):
                return Outcome(step["time/unix"] - fault_time, max(0, last_step["step"] - step["step"] + 1))
        time.sleep(0.02)
    return Outcome(None, None)


def _is_recovered(step: dict[str, Any], last_step: dict[str, Any]) -> bool:
    """Return whether a step was computed after the recovery, and not already in progress at the fault."""
    generation = "elastic/generation"
    return bool(step["step"] <= last_step["step"] or step.get(generation, 0) > last_step.get(generation, 0))


@contextmanager
def _start_platform(*extra: str) -> Iterator[SystemRun]:
    with scratch_dir() as directory:
        run_dir = directory / "run"
        overrides, _ = make_settings((*OVERRIDES, *extra), WORKERS, STEPS)
        command = [
            sys.executable,
            "-m",
            "raytrain_hpc",
            "train",
            *overrides,
            f"run.dir={run_dir}",
            "cluster.address=local",
        ]
        with _start_system(
            "the platform", command, {"RAY_TMPDIR": str(directory)}, directory, run_dir / "metrics.jsonl"
        ) as system:
            yield system


@contextmanager
def _start_ray_train() -> Iterator[SystemRun]:
    with _job_dir() as (directory, job_file):
        slots = str(max(count_usable_cpus(), WORKERS + 1))
        command = [sys.executable, restart_baseline.__file__, str(job_file), str(directory), "ray-train"]
        environment = {"RAY_TMPDIR": str(directory)}
        with _start_system(
            "Ray Train", [*command, str(WORKERS), slots], environment, directory, directory / "steps.jsonl"
        ) as system:
            yield system


@contextmanager
def _start_torchrun() -> Iterator[SystemRun]:
    with _job_dir() as (directory, job_file):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=3", f"--nproc-per-node={WORKERS}"]
        command = [sys.executable, *launcher, restart_baseline.__file__, str(job_file), str(directory)]
        # By default restarted workers share a store with the previous ones. New gloo ranks sometimes read the address
        # of a dead rank from it, and then fail to connect or hang.
        environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with _start_system("torchrun", command, environment, directory, directory / "steps.jsonl") as system:
            yield system


@contextmanager
def _job_dir() -> Iterator[tuple[Path, Path]]:
    with scratch_dir() as directory:
        _, config = make_settings(OVERRIDES, WORKERS, STEPS)
        job_file = directory / "job.json"
        job_file.write_text(json.dumps(build_baseline_job(config, WORKERS, directory).to_json()))
        yield directory, job_file


@contextmanager
def _start_system(
    name: str, command: list[str], environment: dict[str, str], directory: Path, steps: Path
) -> Iterator[SystemRun]:
    def read_pids() -> list[int]:
        workers_file = steps.with_name("workers.json")
        if workers_file.exists():
            return [worker["pid"] for worker in json.loads(workers_file.read_text())["workers"]]
        return [int(path.read_text() or 0) for path in sorted(steps.parent.glob("[0-9].pid"))]

    def read_steps() -> list[dict[str, Any]]:
        return read_jsonl(steps)

    read_commit_times = lambda: [line["time/unix"] for line in read_steps()]  # noqa: E731
    with launch_training(name, command, environment, directory / "output", read_commit_times, read_pids) as process:
        yield SystemRun(process, read_steps)
