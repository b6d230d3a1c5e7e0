"""A run with compiled blocks loses a rank: a warm spare takes its place and compiles nothing."""

from __future__ import annotations

import json
import os
import signal
from functools import partial, wraps
from pathlib import Path
from typing import Any

import raytrain_hpc as rt
from raytrain_hpc.callbacks.callback import Callback
from tests.driver.cli_process import wait_until
from tests.driver.throttle import throttle
from tests.json_lines import read_json_lines
from tests.parallel.layout_run import LLAMA
from tests.warm_pool import make_small_config


class GraphCounter(Callback):
    """Write how many graphs a process has compiled, after its warm-up, before its first step and after each step.

    The process traces graphs, but does not translate them to C++, which takes a minute.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare a process that the callback has reached: every worker gets it before it builds or warms up."""
        import torch
        import torch._dynamo

        from raytrain_hpc.training import compile_warmup

        self.__dict__.update(state)
        if isinstance(torch.compile, partial):
            return
        torch.compile = partial(torch.compile, backend="aot_eager")
        warm_up = compile_warmup.warm_up_compiler

        @wraps(warm_up)
        def warm_up_and_write(*arguments: Any) -> None:
            warm_up(*arguments)
            self._write("warm-up")

        compile_warmup.warm_up_compiler = warm_up_and_write

    def on_generation_start(self) -> None:
        self._write("start")

    def post_step(self, metrics: dict[str, Any]) -> None:
        self._write(metrics["step"])

    def _write(self, moment: str | int) -> None:
        from torch._dynamo.utils import counters

        with (self.directory / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([moment, counters["stats"]["unique_graphs"]]) + "\n")


def read_counts(directory: Path, pid: int) -> list[tuple[str | int, int]]:
    path = directory / f"{pid}.jsonl"
    return [(moment, count) for moment, count in read_json_lines(path)] if path.exists() else []


def test_the_step_after_a_recovery_compiles_nothing(ray_cluster: None, tmp_path: Path) -> None:
    run_dir, counts_dir = tmp_path / "run", tmp_path / "counts"
    counts_dir.mkdir()
    words = [*LLAMA, "parallel.tp=2", "cluster.workers=2", "cluster.spares=1", "train.compile=true"]
    config = make_small_config(run_dir, *words, "train.steps=5000", "checkpoint.interval=0", *throttle(2))
    run = rt.start(config, callbacks=[GraphCounter(counts_dir)])

    def list_warm() -> list[int]:
        pids = [int(path.stem) for path in counts_dir.glob("*.jsonl")]
        return [pid for pid in pids if ("warm-up" in dict(read_counts(counts_dir, pid)))]

    wait_until(list_warm)
    (spare,) = list_warm()
    workers = json.loads((run_dir / "workers.json").read_text())["workers"]
    os.kill(workers[0]["pid"], signal.SIGKILL)
    wait_until(lambda: len(read_counts(counts_dir, spare)) > 3)
    run.stop()
    assert run.result(timeout=240).outcome == "stopped"
    (incident,) = read_json_lines(run_dir / "incidents.jsonl")
    assert (incident["kind"], incident["world_after"], incident["steps_lost"]) == ("died", 2, 0)
    (_, before), (start, at_start), *steps = read_counts(counts_dir, spare)
    assert start == "start" and steps[0][0] == incident["step"] + 1
    assert before > 0 and {at_start, *(count for _, count in steps)} == {before}, "it compiles nothing"
    survivor = read_counts(counts_dir, workers[1]["pid"])
    assert dict(survivor)[incident["step"]] == survivor[-1][1], "and neither does the rank that is left"
