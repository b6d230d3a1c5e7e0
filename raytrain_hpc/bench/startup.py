"""`bench startup`: from the command to the first finished step, beside Ray Train's TorchTrainer on the same model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from statistics import median

from raytrain_hpc.bench import ray_train_baseline
from raytrain_hpc.bench.contenders import log_progress, run_platform, run_process, scratch_dir
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.workloads import SMALL, build_baseline_job, make_settings
from raytrain_hpc.errors import MissingDependencyError

GOAL = 0.5
WORKERS = 2
STEPS = 3  # the last step of a run waits for evaluation and saving: it must not be the first

StartupParts = dict[str, float]

# What lies between the command and the first finished step, in order, and what it is called in result.json.
PARTS = {
    "driver": "",
    "Ray": "cluster_s",
    "actors": "actors_s",
    "imports": "imports_s",
    "model": "model_s",
    "first step": "first_step_s",
}


def run(rounds: int) -> Table:
    """Alternate `rounds` starts of each, every one a fresh process that starts its own Ray."""
    check_ray_train()
    pairs = []
    for _ in range(rounds):
        pairs.append((_time_platform(), _time_ray_train()))
        log_progress(f"platform {sum(pairs[-1][0].values()):.2f} s, Ray Train {sum(pairs[-1][1].values()):.2f} s")
    table = Table(
        f"bench startup: seconds from the command to the first finished step, {WORKERS} workers",
        ("part", "platform s", "Ray Train s", "ratio", "ratio each round", "goal", "met"),
    )
    ours, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
    for part in PARTS:
        table.add_row(part, _median_of_part(ours, part), _median_of_part(theirs, part), None, None, None, None)
    ratios = [sum(mine.values()) / sum(peer.values()) for mine, peer in pairs]
    totals = [median(sum(parts.values()) for parts in arm) for arm in (ours, theirs)]
    table.add_row("total", *totals, median(ratios), ratios, GOAL, median(ratios) <= GOAL)
    table.notes += [
        "medians over the rounds, part by part; the quickstart's model on random tokens",
        "driver: interpreter, first imports and settings; Ray: until the cluster is up; actors: until the last worker "
        "runs Python of its own (for Ray Train until the training function begins, with its controller, torch imported "
        "and the process group formed); imports: of the worker; model: groups, model, weights, data; first step: until "
        "it is committed on rank 0",
        "both start a Ray of their own with as many CPU slots and without its dashboard",
    ]
    return table


def _median_of_part(arm: Sequence[StartupParts], part: str) -> float:
    return median(parts[part] for parts in arm)


def _time_platform() -> StartupParts:
    words, _ = make_settings((*SMALL, "data.path=synthetic"), WORKERS, STEPS)
    ran = run_platform([*words, "cluster.address=local"])
    startup = ran.result["startup"]
    first = ran.commit_times[0]
    parts = {"driver": first - startup["total_s"] - ran.launch_time}
    return parts | {part: startup[key] for part, key in PARTS.items() if key}


def _time_ray_train() -> StartupParts:
    _, config = make_settings((*SMALL, "data.path=synthetic"), WORKERS, STEPS)
    with scratch_dir() as directory:
        described, marked = directory / "job.json", directory / "marks.json"
        described.write_text(json.dumps(build_baseline_job(config, WORKERS, directory).to_json()))
        slots = max(os.cpu_count() or 1, WORKERS + 1)  # as the platform asks for
        command = [sys.executable, ray_train_baseline.__file__, str(described), str(marked), str(WORKERS), str(slots)]
        launched = run_process(command, {"RAY_TMPDIR": str(directory)})
        marks: StartupParts = json.loads(marked.read_text())
    ends = [launched, *(marks[part] for part in PARTS)]
    return {part: after - before for part, before, after in zip(PARTS, ends, ends[1:], strict=False)}


def check_ray_train() -> None:
    """Raise MissingDependency where Ray Train lacks a package."""
    for package in ("pandas", "pyarrow", "fsspec", "requests"):
        if find_spec(package) is None:
            raise MissingDependencyError(f"bench: Ray Train needs {package}; run `pip install 'ray[train]'`")
