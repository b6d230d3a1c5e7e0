"""A run in a process of its own on a simulated cluster, and what a test sees of it: output, steps, number of ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.driver.cli_process import Curve, curve_point, wait_until
from tests.driver.two_node_cluster import TwoNodeCluster
from tests.json_lines import read_json_lines
from tests.warm_pool import SMALL_OVERRIDES, WarmPool, get_step_metrics, make_small_config

WORDS = [
    *SMALL_OVERRIDES,
    "train.deterministic=elastic",
    "train.micro_batch_size=2",
    "checkpoint.interval=0",
    "lr_scheduler.name=constant",
]
FOLLOWING = ["cluster.workers=auto", "cluster.cpus_per_worker=1", "data.engine=local"]


class FollowingRun:
    """A run with `words` besides WORDS, whose output goes to a file beside its directory."""

    def __init__(self, cluster: TwoNodeCluster, directory: Path, *words: str):
        self.directory, self.out = directory, directory.with_suffix(".out")
        command = [sys.executable, "-m", "raytrain_hpc", "train", *WORDS, *words]
        command += [f"run.dir={directory}", f"run.name={directory.name}"]
        with self.out.open("a") as out:
            self.process = subprocess.Popen(command, env=cluster.env, stdout=out, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.out.read_text()

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_json_lines(self.directory / "metrics.jsonl")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        def is_fulfilled() -> bool:
            assert self.process.poll() is None, self.output
            return condition()

        wait_until(is_fulfilled, self.out, timeout_s=90)

    def wait_for_size(self, size: int) -> None:
        """Wait until two steps were trained on `size` ranks."""
        self.wait_until(lambda: [line["elastic/world_size"] for line in self.read_metrics()[-2:]] == [size, size])

    def find_changes(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the metrics of the steps before and after each change of the number of ranks."""
        metrics_of_step = {line["step"]: line for line in self.read_metrics()}
        lines = [metrics_of_step[step] for step in sorted(metrics_of_step)]
        key = "elastic/world_size"
        return [(before, after) for before, after in pairwise(lines) if before[key] != after[key]]

    def read_curve(self, steps: int) -> Curve:
        """Return the curve of steps 1..N, of which the last line of each counts."""
        metrics_of_step = {line["step"]: line for line in self.read_metrics()}
        return [curve_point(metrics_of_step[step]) for step in range(1, steps + 1)]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def train_in_one_process(pool: WarmPool, directory: Path, steps: int) -> Curve:
    """Return the curve of WORDS on one rank."""
    config = make_small_config(directory, *WORDS, "cluster.workers=1", f"train.steps={steps}")
    return [curve_point(metrics) for metrics in get_step_metrics(pool.train(config)[0])]
