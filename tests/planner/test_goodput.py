"""Checkpoint intervals and goodput against published figures, a simulation, and other intervals."""

from __future__ import annotations

import random

import pytest

from raytrain_hpc.planner.goodput import estimate_goodput


def test_a_published_cluster_has_the_published_goodput() -> None:
    """arXiv 2407.21783: 16,384 GPUs were interrupted every 3.1 h, and trained more than 90 % of the time."""
    expected = estimate_goodput(16_384, save_s=2.0, restart_s=600.0, pause_s=2.0)
    assert expected.between_failures_s / 3600 == pytest.approx(54 * 24 / 419, rel=0.02)
    assert 0.90 < expected.from_checkpoints < expected.in_memory < 1.0


def simulate_progress(between_s: float, every_s: float, save_s: float, restart_s: float, seed: int) -> float:
    """Return the share of time that becomes progress, with random failures, over 2,000 failures."""
    rng, progress, elapsed = random.Random(seed), 0.0, 0.0
    for _ in range(2000):
        lifetime_s = rng.expovariate(1 / between_s)
        intervals = int(lifetime_s // (every_s + save_s))
        progress += intervals * every_s
        elapsed += lifetime_s + restart_s
    return progress / elapsed


CLUSTERS = [(1000, 1.0, 60.0), (16_384, 5.0, 300.0), (4096, 0.2, 10.0)]


@pytest.mark.parametrize(("devices", "save_s", "restart_s"), CLUSTERS)
def test_goodput_matches_a_simulation_at_the_best_interval(devices: int, save_s: float, restart_s: float) -> None:
    expected = estimate_goodput(devices, save_s=save_s, restart_s=restart_s, pause_s=1.0)
    share = simulate_progress(expected.between_failures_s, expected.save_every_s, save_s, restart_s, seed=devices)
    assert expected.from_checkpoints == pytest.approx(share, abs=0.005)
    for factor in (0.3, 3.0):
        assert (
            simulate_progress(
                expected.between_failures_s, factor * expected.save_every_s, save_s, restart_s, seed=devices
            )
            < share
        )


def test_extreme_failure_rates_and_costs() -> None:
    hopeless = estimate_goodput(1_000_000, save_s=600.0, restart_s=900.0, pause_s=1.0)
    assert hopeless.from_checkpoints == 0.0 and hopeless.save_every_s == hopeless.between_failures_s == 180.0
    assert estimate_goodput(1, save_s=0.0, restart_s=0.0, pause_s=0.0).from_checkpoints == 1.0
