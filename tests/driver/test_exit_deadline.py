"""How long ranks of an aborted generation may take to end, on a simulated clock."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_hpc.driver import exit_deadline, health_monitor
from raytrain_hpc.driver.exit_deadline import ExitDeadline
from raytrain_hpc.driver.health_monitor import HealthMonitor
from raytrain_hpc.elastic.watchdog import WorkerHealth
from tests.warm_pool import make_small_config

HEALTHY = WorkerHealth(0, True, False, 0.0, 0.0, "training", 1, 0.1)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(exit_deadline, "time", clock := Clock())
    return clock


class Health(HealthMonitor):
    """The monitor of two ranks whose health is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *words: str):
        context = SimpleNamespace(get_node_id=lambda: "driver")
        monkeypatch.setattr(health_monitor, "ray", SimpleNamespace(get_runtime_context=lambda: context))
        super().__init__(make_small_config(None, *words))
        self.ranks = {rank: replace(HEALTHY, rank=rank, progress_age_s=1.0) for rank in range(2)}

    def collect_health(self) -> dict[int, WorkerHealth]:
        return self.ranks

    def set(self, rank: int, **fields: Any) -> None:
        self.ranks[rank] = replace(self.ranks[rank], **fields)


def measure(clock: Clock, deadline: ExitDeadline, ranks: list[int], limit_s: float = 400.0) -> float:
    """Return when the deadline has passed."""
    while not deadline.has_passed(ranks) and clock.now < limit_s:
        clock.now += 0.5
    return clock.now


@pytest.mark.parametrize("phase", ["building", "idle"])
def test_ranks_that_hang_have_ten_seconds_or_three_steps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    health = Health(monkeypatch)
    health.set(0, phase=phase)
    assert measure(clock, ExitDeadline(health), [0, 1]) == 10.0
    health.set(1, step_s=20.0)
    assert measure(clock, ExitDeadline(health), [0]) == 70.0


@pytest.mark.parametrize(("words", "until_s"), [(["fault.stall_timeout=30"], 40.0), ([], 10.5)])
def test_a_rank_that_makes_no_progress_in_a_step_has_its_stall_timeout(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, words: list[str], until_s: float
) -> None:
    """It may be in a callback, for which users set that timeout."""
    health = Health(monkeypatch, *words)
    deadline = ExitDeadline(health)
    while not deadline.has_passed([0]):
        clock.now += 0.5
        health.set(0, progress_age_s=clock.now)
    assert clock.now == until_s


@pytest.mark.parametrize("phase", ["saving", "evaluating", "loading", "callback"])
def test_a_busy_rank_is_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    health = Health(monkeypatch)
    health.set(1, phase=phase)
    deadline = ExitDeadline(health)
    assert measure(clock, deadline, [0, 1], 40.0) == 40.0
    health.set(1, phase="training", progress_age_s=2.0)  # over 0.8 s
    assert measure(clock, deadline, [0, 1]) == 50.0, "ten seconds after it was last seen busy"


@pytest.mark.parametrize("fields", [{"is_frozen": True}, {"is_alive": False}, {"progress_age_s": 301.0}])
def test_a_rank_that_is_stopped_dead_or_over_the_limit_of_its_phase_is_not_waited_for(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    health = Health(monkeypatch)
    health.set(1, phase="saving", **fields)
    assert measure(clock, ExitDeadline(health), [1]) == 10.0


def test_a_busy_rank_that_has_ended_does_not_delay_others(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    health = Health(monkeypatch)
    health.set(1, phase="saving")
    assert measure(clock, ExitDeadline(health), [0]) == 10.0
