"""The two sides of a comparison, each run as processes of its own in a directory that is removed afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raytrain_hpc.bench import torch_baseline
from raytrain_hpc.bench.interleave import TrainingProcess, launch_training
from raytrain_hpc.bench.torch_baseline import BaselineJob
from raytrain_hpc.bench.workloads import build_baseline_job
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import RunFailedError

TIMEOUT_S = 1800


@dataclass(frozen=True)
class PlatformRun:
    """What a `raytrain-hpc train` left behind, read before its directory was removed."""

    launch_time: float  # Unix time at which the command was given
    metrics: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def commit_times(self) -> list[float]:
        """When each step was committed."""
        return [line["time/unix"] for line in self.metrics]


@contextmanager
def scratch_dir() -> Iterator[Path]:
    """A directory with a short name (Ray keeps sockets in it), removed afterwards."""
    with TemporaryDirectory(prefix="rt-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def run_platform(overrides: Sequence[str]) -> PlatformRun:
    """Train with these settings by the command line that a user types."""
    with scratch_dir() as directory:
        run_dir = directory / "run"
        command = [sys.executable, "-m", "raytrain_hpc", "train", *overrides, f"run.dir={run_dir}"]
        launched = run_process(command, {"RAY_TMPDIR": str(directory)})
        metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return PlatformRun(launched, metrics, json.loads((run_dir / "result.json").read_text()))


@contextmanager
def launch_platform(overrides: Sequence[str], name: str = "the platform") -> Iterator[TrainingProcess]:
    """The platform as a contestant, by the command line that a user types; it needs a Ray that runs already."""
    with scratch_dir() as directory:
        run_dir = directory / "run"
        with launch_training(
            name,
            # Whoever is not on turn is frozen, which is to be no fault.
            [
                sys.executable,
                "-m",
                "raytrain_hpc",
                "train",
                *overrides,
                f"run.dir={run_dir}",
                "fault.stall_timeout=1e6",
            ],
            {},
            directory / "output",
            lambda: [line["time/unix"] for line in read_jsonl(run_dir / "metrics.jsonl")],
            lambda: _read_worker_pids(run_dir / "workers.json"),
        ) as one:
            yield one


@contextmanager
def launch_torch_baseline(config: Config, processes: int) -> Iterator[TrainingProcess]:
    """The plain loop as a contestant: one Python process, or several under torchrun."""
    with scratch_dir() as directory:
        job = build_baseline_job(config, processes, directory)
        steps = directory / "steps.jsonl"
        with launch_training(
            "the plain loop",
            build_baseline_command(job, processes, directory, steps),
            {"OMP_NUM_THREADS": str(job.threads)},
            directory / "output",
            lambda: [line["unix"] for line in read_jsonl(steps)],
            lambda: [int(path.read_text() or 0) for path in sorted(directory.glob("*.pid"))],
        ) as one:
            yield one


def build_baseline_command(job: BaselineJob, processes: int, directory: Path, steps: Path) -> list[str]:
    """The command of the plain loop, its job described in `directory`."""
    described = directory / "job.json"
    described.write_text(json.dumps(job.to_json()))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *(launcher if processes > 1 else []), torch_baseline.__file__, str(described), str(steps)]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file that are written to their end so far."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _read_worker_pids(workers: Path) -> list[int]:
    return [worker["pid"] for worker in json.loads(workers.read_text())["workers"]] if workers.exists() else []


def log_progress(text: str) -> None:
    """One line of progress, beside the table and not in it."""
    print(text, file=sys.stderr, flush=True)


def run_process(command: Sequence[str], environment: dict[str, str]) -> float:
    """Run a command to its end. Returns when it was given; raises RunFailed with its last line where it fails."""
    launched = time.time()
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RunFailedError(f"{' '.join(command)}: exit code {done.returncode}: {lines[-1] if lines else 'no output'}")
    return launched
