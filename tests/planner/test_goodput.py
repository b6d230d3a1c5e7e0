"""Checkpoint intervals and goodput against published figures, a simulation, and the best of many intervals."""

from __future__ import annotations

import random

import pytest

from raytrain_hpc.planner.goodput import estimate_goodput


def test_a_published_fleet() -> None:
    """arXiv 2407.21783: 16,384 GPUs were interrupted every 3.1 h, and trained for more than 90 % of the time."""
    found = estimate_goodput(16_384, save_s=2.0, restart_s=600.0, pause_s=2.0)
    assert found.between_failures_s / 3600 == pytest.approx(54 * 24 / 419, rel=0.02)
    assert 0.90 < found.from_checkpoints < found.in_memory < 1.0


def simulated(between_s: float, every_s: float, save_s: float, restart_s: float, seed: int) -> float:
    """Progress by time passed, failures at random, over 2,000 of them."""
    chance, progress, passed = random.Random(seed), 0.0, 0.0
    for _ in range(2000):
        lived = chance.expovariate(1 / between_s)
        whole = int(lived // (every_s + save_s))
        progress += whole * every_s
        passed += lived + restart_s
    return progress / passed


FLEETS = [(1000, 1.0, 60.0), (16_384, 5.0, 300.0), (4096, 0.2, 10.0)]


@pytest.mark.parametrize(("devices", "save_s", "restart_s"), FLEETS)
def test_what_a_simulation_gives(devices: int, save_s: float, restart_s: float) -> None:
    found = estimate_goodput(devices, save_s=save_s, restart_s=restart_s, pause_s=1.0)
    share = simulated(found.between_failures_s, found.save_every_s, save_s, restart_s, seed=devices)
    assert found.from_checkpoints == pytest.approx(share, abs=0.005)
    for other in (0.3, 3.0):
        assert simulated(found.between_failures_s, other * found.save_every_s, save_s, restart_s, seed=devices) < share


def test_limits() -> None:
    hopeless = estimate_goodput(1_000_000, save_s=600.0, restart_s=900.0, pause_s=1.0)
    assert hopeless.from_checkpoints == 0.0 and hopeless.save_every_s == hopeless.between_failures_s == 180.0
    assert estimate_goodput(1, save_s=0.0, restart_s=0.0, pause_s=0.0).from_checkpoints == 1.0
