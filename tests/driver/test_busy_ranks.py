"""The end of a generation on Ray while callbacks of the user run: what a rank still knows is not lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import raytrain_hpc as rt
from raytrain_hpc.driver import health_monitor
from raytrain_hpc.errors import RaytrainError
from tests.driver.cli_process import wait_until
from tests.driver.test_ray_faults import STEPS, make_config, read_incidents, read_lines, read_pids

SLEEP_S = 4.0


class SlowCallback(rt.Callback):
    """A callback that takes long on rank 0 after step 8. `begun`: a file that it creates then."""

    def __init__(self, begun: Path):
        self._begun = begun

    def post_step(self, metrics: dict[str, Any]) -> None:
        if self.context.rank == 0 and metrics["step"] == 8 and self.context.generation == 1:
            self._begun.touch()
            time.sleep(SLEEP_S)


class FailingCallback(rt.Callback):
    def post_step(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] == 33:
            raise ValueError("no more")


def test_a_rank_in_a_slow_callback_survives_the_loss_of_another_one(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than a rank that hangs may, and ends later."""
    monkeypatch.setattr(health_monitor, "_MIN_SETTLE_S", SLEEP_S / 4)
    begun, words = tmp_path / "begun", ["fault.stall_timeout=2", "checkpoint.interval=0"]
    run = rt.start(make_config(tmp_path, *words), callbacks=[SlowCallback(begun)])
    wait_until(begun.exists)
    os.kill(read_pids(tmp_path)[1], signal.SIGKILL)
    result = run.result(timeout=120)
    assert (result.outcome, result.restarts) == ("done", 1)
    (incident,) = read_incidents(tmp_path)
    assert (incident["ranks"], incident["steps_lost"], incident["world_after"]) == ([1], 0, 1)
    assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, STEPS + 1)), "no step is repeated"


def test_the_metrics_of_all_steps_are_written_if_the_run_ends_with_an_error(ray_cluster: None, tmp_path: Path) -> None:
    """Ranks are asked for records once a second only."""
    with pytest.raises(RaytrainError, match="no more"):
        rt.train(make_config(tmp_path), callbacks=[FailingCallback()], quiet=True)
    assert [line["step"] for line in read_lines(tmp_path)][-1] in (32, 33)
