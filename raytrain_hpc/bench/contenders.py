"""The sides of a comparison: each runs in its own processes, in a directory that is removed afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from raytrain_hpc.bench import torch_baseline
from raytrain_hpc.bench.interleave import TrainingProcess, launch_training
from raytrain_hpc.bench.torch_baseline import PLAIN, BaselineJob
from raytrain_hpc.bench.workloads import build_baseline_job
from raytrain_hpc.config.schema import Config
from raytrain_hpc.config.training_config import computes_in_bf16
from raytrain_hpc.errors import RunFailedError

TIMEOUT_S = 1800
# Relative difference of first losses: rounding errors of a mean over the tokens of a step.
LOSS_TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3}


@dataclass(frozen=True)
class PlatformRun:
    """Metrics and result of a finished `raytrain-hpc train`, read before its directory was removed."""

    launch_time: float  # Unix time at which the command was started
    metrics: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def commit_times(self) -> list[float]:
        """Unix time at which each step was committed."""
        return [line["time/unix"] for line in self.metrics]


@contextmanager
def scratch_dir() -> Iterator[Path]:
    """Create a temporary directory. Its path is short because Ray puts Unix sockets into it."""
    with TemporaryDirectory(prefix="rt-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def run_platform(overrides: Sequence[str]) -> PlatformRun:
    """Run `raytrain-hpc train` to its end and return its metrics."""
    with scratch_dir() as directory:
        run_dir = directory / "run"
        command = [sys.executable, "-m", "raytrain_hpc", "train", *overrides, f"run.dir={run_dir}"]
        launch_time = run_process(command, {"RAY_TMPDIR": str(directory)})
        metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return PlatformRun(launch_time, metrics, json.loads((run_dir / "result.json").read_text()))


@contextmanager
def launch_platform(
    overrides: Sequence[str], name: str = "the platform", environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[TrainingProcess]:
    """Start `raytrain-hpc train` as a training process. `overrides` name a running Ray cluster or cluster.workers=0.

    Without such, the run starts a Ray; then `environment` has a RAY_TMPDIR.
    """
    with scratch_dir() as directory:
        run_dir = directory / "run"
        own_pid: list[int] = []  # with cluster.workers=0 the driver is the worker
        with launch_training(
            name,
            # A stopped process must not count as a stall.
            [
                sys.executable,
                "-m",
                "raytrain_hpc",
                "train",
                *overrides,
                f"run.dir={run_dir}",
                "fault.stall_timeout=1e6",
            ],
            dict(environment),
            directory / "output",
            lambda: [line["time/unix"] for line in read_jsonl(run_dir / "metrics.jsonl")],
            lambda: own_pid or _read_worker_pids(run_dir / "workers.json"),
            lambda: [line["train/loss"] for line in read_jsonl(run_dir / "metrics.jsonl")],
        ) as process:
            own_pid += [process.process.pid] * ("cluster.workers=0" in overrides)
            yield process
            own_pid.clear()


@contextmanager
def launch_torch_baseline(config: Config, processes: int, peer: str = PLAIN) -> Iterator[TrainingProcess]:
    """Start a PyTorch baseline as a training process: one Python process, or several under torchrun."""
    with scratch_dir() as directory:
        job = build_baseline_job(config, processes, directory, peer)
        steps = directory / "steps.jsonl"
        with launch_training(
            f"the PyTorch baseline ({peer})",
            build_baseline_command(job, processes, directory, steps),
            {"OMP_NUM_THREADS": str(job.threads)},
            directory / "output",
            lambda: [line["unix"] for line in read_jsonl(steps)],
            lambda: [int(path.read_text() or 0) for path in sorted(directory.glob("*.pid"))],
            lambda: _average_over_ranks([steps, *directory.glob("steps.*.jsonl")]),
        ) as process:
            yield process


def build_baseline_command(job: BaselineJob, processes: int, directory: Path, steps: Path) -> list[str]:
    """Write the job to `directory` and return the command that runs the PyTorch baseline on it."""
    job_file = directory / "job.json"
    job_file.write_text(json.dumps(job.to_json()))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *(launcher if processes > 1 else []), torch_baseline.__file__, str(job_file), str(steps)]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSONL file that may still be written to."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _read_worker_pids(workers: Path) -> list[int]:
    return [worker["pid"] for worker in json.loads(workers.read_text())["workers"]] if workers.exists() else []


def _average_over_ranks(files: Sequence[Path]) -> list[float]:
    """Return the mean loss over ranks of the steps that all ranks have recorded."""
    columns = ([line["loss"] for line in read_jsonl(path)] for path in files)
    return [fmean(losses) for losses in zip(*columns, strict=False)]


def check_first_losses(peer: str, losses: Sequence[float], platform_losses: Sequence[float], dtype: str) -> None:
    """Raise RunFailedError unless the losses of the first step, from the same weights and tokens, agree to rounding."""
    tolerance = LOSS_TOLERANCE["bf16" if computes_in_bf16(dtype) else "fp32"]
    if abs(losses[0] - platform_losses[0]) > tolerance * platform_losses[0]:
        raise RunFailedError(
            f"--against {peer}: its first loss is {losses[0]!r}, the platform's {platform_losses[0]!r}: not the same "
            "model; its version may build another one than this comparison expects"
        )


def log_progress(text: str) -> None:
    """Print one line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def run_process(command: Sequence[str], environment: dict[str, str]) -> float:
    """Run a command to its end and return the Unix time at which it was started.

    Raises:
        RunFailedError: The command failed. The message has its last line of output.
    """
    launch_time = time.time()
    finished = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if finished.returncode:
        lines = [line for line in (finished.stdout + finished.stderr).splitlines() if line.strip()]
        raise RunFailedError(
            f"{' '.join(command)}: exit code {finished.returncode}: {lines[-1] if lines else 'no output'}"
        )
    return launch_time
