"""Several processes of a node lost at once: no step is lost, and the curve has the bits of an undisturbed run."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

import raytrain_hpc as rt
from tests.driver.cli_process import count_steps, read_curve, wait_until
from tests.driver.losing_processes import kill_workers, make_config, read_incidents, train_reference
from tests.warm_pool import WarmPool

STEPS = 50  # more than a fast machine trains until the kill


@pytest.fixture(scope="module")
def reference_curve(pool: WarmPool) -> list[tuple[float, float, float]]:
    return train_reference(pool, STEPS)


@pytest.mark.parametrize(("count", "within_s"), [(1, 0.0), (2, 0.2), (3, 0.2), (4, 0.0)])
def test_no_step_is_lost(ray_cluster: None, reference_curve, tmp_path: Path, count: int, within_s: float) -> None:
    run = rt.start(make_config(tmp_path, STEPS))
    wait_until(lambda: count_steps(tmp_path) >= 6)
    if within_s:  # half-way to the next report, so that the driver lacks steps that are committed
        time.sleep(0.5)
    kill_workers(tmp_path, count, random.Random(count), within_s)
    result = run.result(timeout=240)
    assert (result.outcome, result.steps) == ("done", STEPS) and result.restarts >= 1
    incidents = read_incidents(tmp_path)
    assert len(incidents) == 1 or within_s, incidents
    assert [incident["steps_lost"] for incident in incidents] == [0] * len(incidents), incidents
    assert read_curve(tmp_path, STEPS) == reference_curve
