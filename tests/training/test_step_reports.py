"""When a committed step is reported to the driver: under partitioned state, once all ranks have it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.errors import RunFailedError
from raytrain_hpc.training.trainer import Trainer
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS = 3
LAYOUTS = {
    "replicas": "parallel.zero=0",
    "ZeRO-1": "parallel.zero=1",
    "ZeRO-3": "parallel.zero=3",
    "pp": "parallel.pp=2",
    "tp": "parallel.tp=2",
}


class ReportProbe(Callback):
    """Observer of the steps that this rank has reported before and after the all-reduce of each step."""

    def __init__(self, trainer: Trainer, fails_at: int | None):
        self._trainer, self._fails_at = trainer, fails_at
        self.records: list[dict[str, Any]] = []
        self.before: list[int] = []
        self.after: list[int] = []

    def pre_step(self) -> None:
        """Runs before any rank can know how far the others are."""
        self.before.append(self.count_reported())
        if self._trainer.callbacks.context.step == self._fails_at:
            raise RunFailedError("the run is over")

    def pre_optim_step(self) -> None:
        self.after.append(self.count_reported())

    def count_reported(self) -> int:
        self.records += self._trainer.control.drain()
        return len(get_step_metrics(self.records))


def train_with_probe(trainer: Trainer, fails_at: int | None = None) -> tuple[list[int], list[int], int]:
    probe = ReportProbe(trainer, fails_at)
    trainer.callbacks.add(probe)
    with suppress(RunFailedError):
        trainer.run(0, STEPS)
    return probe.before, probe.after, probe.count_reported()


def fail_at_step_2(trainer: Trainer) -> tuple[list[int], list[int], int]:
    return train_with_probe(trainer, fails_at=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_reported_when_no_lost_rank_can_undo_it(pool: WarmPool, layout: str) -> None:
    config = make_small_config(None, "cluster.workers=2", LAYOUTS[layout], f"train.steps={STEPS}")
    of_rank_0, of_rank_1 = pool.inspect_trainers(train_with_probe, config)
    reported_at_once = layout == "replicas"
    assert of_rank_0 == ([0, 1, 2] if reported_at_once else [0, 0, 1], [0, 1, 2], STEPS)
    assert of_rank_1 == ([0] * STEPS, [0] * STEPS, 0), "rank 0 reports for all"


def test_the_last_step_is_reported_when_an_error_ends_the_run(pool: WarmPool) -> None:
    config = make_small_config(None, "cluster.workers=2", "parallel.zero=3", f"train.steps={STEPS}")
    assert pool.inspect_trainers(fail_at_step_2, config)[0] == ([0, 0, 1], [0, 1], 2)
