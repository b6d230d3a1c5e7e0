"""Log lines: mean rates of a step line, and the text of an incident."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_hpc.observability.console import format_incident, format_step_line
from raytrain_hpc.observability.metrics import compute_mean_rates


def make_metrics(step: int, step_s: float, *, workers: int = 2, mfu: float | None = None) -> dict[str, Any]:
    """Return the metrics of a step of 600 tokens."""
    return {
        "step": step,
        "train/loss": 2.0,
        "train/lr": 1e-3,
        "train/grad_norm": 1.0,
        "throughput/tokens_per_sec": 600 / step_s,
        "throughput/tokens_per_sec_per_device": 600 / step_s / workers,
        "throughput/mfu": mfu,
        "time/step_s": step_s,
        "memory/peak_gib": 0.5,
        "elastic/world_size": workers,
    }


def test_step_line_shows_mean_rates_since_the_last_line() -> None:
    steps = [make_metrics(1, 1.0, mfu=0.4), make_metrics(2, 1.0, mfu=0.4), make_metrics(3, 4.0, mfu=0.1)]
    line = format_step_line(steps[-1], steps, 9, None)
    assert "tok/s 300 (150/worker)" in line, "1800 tokens in 6 s"
    assert "mfu 20.0%" in line and "eta 12s" in line, "6 steps of 2 s"
    alone = format_step_line(steps[-1], [], 9, None)
    assert "tok/s 150 (75/worker)" in alone and "mfu 10.0%" in alone and "eta 24s" in alone


def test_mean_rates_weight_workers_by_time() -> None:
    means = compute_mean_rates([make_metrics(1, 1.0, workers=3, mfu=0.5), make_metrics(2, 3.0, workers=1)])
    assert means["throughput/tokens_per_sec_per_device"] == pytest.approx(1200 / (3 * 1.0 + 1 * 3.0))
    assert means["throughput/mfu"] is None, "unknown for one of the steps"
    assert compute_mean_rates([]) == {}


@pytest.mark.parametrize(
    ("incident", "text"),
    [
        ({"kind": "died", "rank": 1, "ranks": [1], "step": 11}, "rank 1 died at step 12"),
        ({"kind": "node lost", "rank": 2, "ranks": [2, 3], "step": 8}, "ranks 2, 3 lost with the node at step 9"),
        ({"kind": "slow", "rank": 0, "step": 4}, "rank 0 slow at step 5"),
        ({"kind": "not finite", "rank": None, "step": 4}, "not finite at step 5"),
    ],
)
def test_incident_in_words(incident: dict[str, Any], text: str) -> None:
    assert format_incident(incident) == text
