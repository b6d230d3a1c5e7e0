"""What counts as a step's time: all that its loop does, except checkpoints and evaluations."""

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
from raytrain_hpc.training.timers import StepTimer
from raytrain_hpc.training.trainer import Trainer
from tests.warm_pool import make_small_config

TAKES = {
    (Trainer, "train_step"): 1.0,
    (ReplicaCheck, "compare"): 10.0,
    (Checkpointer, "save"): 100.0,
    (Trainer, "evaluate"): 1e3,
}


class Clock:
    """Goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def passes(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seconds: float) -> None:
        """From now on that method takes so long."""
        real = getattr(owner, name)

        def slow(*arguments: Any, **named: Any) -> Any:
            self.now += seconds
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, slow)


def test_a_step_lasts_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    laps = StepTimer()
    clock.now = 2.0
    assert laps.end_step() == 2.0
    clock.now = 3.0  # something after the step, which nobody names
    with laps.exclude():
        clock.now = 10.0
    clock.now = 14.0
    assert laps.end_step() == 5.0
    assert laps.end_step() == 0.0


def test_comparing_replicas_counts_and_checkpoints_and_evaluations_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train.steps=5", "fault.compare_every=2", "checkpoint.every=3", "train.eval_every=1"]
    clock = Clock(monkeypatch)
    for (owner, name), seconds in TAKES.items():
        clock.passes(monkeypatch, owner, name, seconds)
    rt.train(make_small_config(tmp_path, *words, "cluster.workers=0"), quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Compared after steps 2 and 4, and before what is saved after 3 and 5.
    assert [line["time/step_s"] for line in lines] == [1.0, 1.0, 11.0, 11.0, 11.0]
