"""`bench startup`: seconds from the command to the first finished step, compared with Ray Train's TorchTrainer."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from statistics import median

from raytrain_hpc.bench import ray_train_baseline
from raytrain_hpc.bench.contenders import log_progress, run_platform, run_process, scratch_dir
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.workloads import SMALL, build_baseline_job, make_settings
from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.errors import MissingDependencyError

GOAL = 0.5
WORKERS = 2
STEPS = 3  # more than one, since the last step of a run includes evaluation and saving

StartupParts = dict[str, float]

# Parts of the startup, in order, and their keys in result.json.
PARTS = {
    "driver": "",
    "Ray": "cluster_s",
    "actors": "actors_s",
    "imports": "imports_s",
    "model": "model_s",
    "first step": "first_step_s",
}


def run(rounds: int) -> Table:
    """Alternate `rounds` startups of each side, each in a new process that starts its own Ray."""
    check_ray_train()
    pairs = []
    for _ in range(rounds):
        pairs.append((_time_platform(), _time_ray_train()))
        log_progress(f"platform {sum(pairs[-1][0].values()):.2f} s, Ray Train {sum(pairs[-1][1].values()):.2f} s")
    table = Table(
        f"bench startup: seconds from the command to the first finished step, {WORKERS} workers",
        ("part", "platform s", "Ray Train s", "ratio", "ratio each round", "goal", "met"),
    )
    platform_runs, ray_train_runs = ([pair[i] for pair in pairs] for i in (0, 1))
    for part in PARTS:
        table.add_row(
            part,
            _compute_part_median(platform_runs, part),
            _compute_part_median(ray_train_runs, part),
            None,
            None,
            None,
            None,
        )
    ratios = [sum(platform_parts.values()) / sum(ray_train_parts.values()) for platform_parts, ray_train_parts in pairs]
    totals = [median(sum(parts.values()) for parts in runs) for runs in (platform_runs, ray_train_runs)]
    table.add_row("total", *totals, median(ratios), ratios, GOAL, median(ratios) <= GOAL)
    table.notes += [
        "medians over the rounds, part by part; the quickstart's model on random tokens",
        "driver: interpreter, first imports and settings; Ray: until the cluster is up; actors: until the last worker "
        "runs Python code (for Ray Train until the training function starts, including its controller, the import of "
        "torch and the process group); imports: of the worker; model: process groups, model, weights, data; first "
        "step: until it is committed on rank 0",
        "both start their own Ray, with the same number of CPU slots and without the dashboard",
    ]
    return table


def _compute_part_median(runs: Sequence[StartupParts], part: str) -> float:
    return median(parts[part] for parts in runs)


def _time_platform() -> StartupParts:
    overrides, _ = make_settings((*SMALL, "data.path=synthetic"), WORKERS, STEPS)
    platform_run = run_platform([*overrides, "cluster.address=local"])
    startup = platform_run.result["startup"]
    first_step = platform_run.commit_times[0]
    parts = {"driver": first_step - startup["total_s"] - platform_run.launch_time}
    return parts | {part: startup[key] for part, key in PARTS.items() if key}


def _time_ray_train() -> StartupParts:
    _, config = make_settings((*SMALL, "data.path=synthetic"), WORKERS, STEPS)
    with scratch_dir() as directory:
        job_file, marks_file = directory / "job.json", directory / "marks.json"
        job_file.write_text(json.dumps(build_baseline_job(config, WORKERS, directory).to_json()))
        slots = max(count_usable_cpus(), WORKERS + 1)  # as many as the platform requests
        command = [
            sys.executable,
            ray_train_baseline.__file__,
            str(job_file),
            str(marks_file),
            str(WORKERS),
            str(slots),
        ]
        launch_time = run_process(command, {"RAY_TMPDIR": str(directory)})
        marks: StartupParts = json.loads(marks_file.read_text())
    ends = [launch_time, *(marks[part] for part in PARTS)]
    return {part: after - before for part, before, after in zip(PARTS, ends, ends[1:], strict=False)}


def check_ray_train() -> None:
    """Check that the packages that Ray Train needs are installed.

    Raises:
        MissingDependencyError: A package is missing.
    """
    for package in ("pandas", "pyarrow", "fsspec", "requests"):
        if find_spec(package) is None:
            raise MissingDependencyError(f"bench: Ray Train needs {package}; run `pip install 'ray[train]'`")
