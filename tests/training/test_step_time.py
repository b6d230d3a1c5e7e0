"""Step time covers everything in the loop except checkpoints and evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raytrain_hpc as rt
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.training import timers
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.evaluator import Evaluator
from raytrain_hpc.training.timers import StepTimer
from raytrain_hpc.training.trainer import Trainer
from tests.warm_pool import make_small_config

DURATIONS = {
    (Trainer, "train_step"): 1.0,
    (ReplicaCheck, "compare"): 10.0,
    (Checkpointer, "save"): 100.0,
    (Evaluator, "evaluate"): 1e3,
}


class Clock:
    """A clock that advances only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def slow_down(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seconds: float) -> None:
        """Let each call of a method take this long."""
        original = getattr(owner, name)

        def slow(*arguments: Any, **keywords: Any) -> Any:
            self.now += seconds
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, slow)


def test_step_starts_at_the_end_of_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timer = StepTimer()
    clock.now = 2.0
    assert timer.end_step() == 2.0
    clock.now = 3.0  # untimed work after the step
    with timer.exclude():
        clock.now = 10.0
    clock.now = 14.0
    assert timer.end_step() == 5.0
    assert timer.end_step() == 0.0


def test_replica_check_counts_but_checkpoints_and_evaluations_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["train.steps=5", "fault.replica_check_interval=2", "checkpoint.interval=3", "eval.interval=1"]
    clock = Clock(monkeypatch)
    for (owner, name), seconds in DURATIONS.items():
        clock.slow_down(monkeypatch, owner, name, seconds)
    rt.train(make_small_config(tmp_path, *overrides, "cluster.workers=0"), quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Replicas are compared after steps 2 and 4, and before the checkpoints of steps 3 and 5.
    assert [line["time/step_s"] for line in lines] == [1.0, 1.0, 11.0, 11.0, 11.0]
