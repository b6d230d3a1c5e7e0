"""Two runs on one cluster: the one of higher priority gets devices of the other, which gets them back.

The losses of both are bit for bit those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_hpc.cli.status import format_status
from tests.driver.following_run import train_in_one_process
from tests.driver.sharing_runs import SLOTS, URGENT_SLOTS, URGENT_STEPS, SharedCluster
from tests.warm_pool import WarmPool

pytestmark = pytest.mark.timeout(240)

MAX_HAND_OVER_S = 5.0


@pytest.fixture
def shared(ray_python: Path, tmp_path: Path) -> Iterator[SharedCluster]:
    cluster = SharedCluster(tmp_path, ray_python)
    yield cluster
    cluster.close()


def test_a_run_of_higher_priority_gets_devices_and_returns_them(shared: SharedCluster, pool: WarmPool) -> None:
    patient, urgent = shared.run, shared.start_urgent_run()
    urgent.wait_until(lambda: len(urgent.read_metrics()) >= URGENT_STEPS // 4)
    status = "\n".join(format_status(patient.directory))
    assert "workers    2: " in status and "; run urgent0 of priority 5 has other devices" in status
    shared.kill_coordinator()
    assert urgent.process.wait(timeout=60) == 0, urgent.output
    patient.wait_for_size(SLOTS)
    patient.process.terminate()
    assert patient.process.wait(timeout=60) == 3, patient.output
    sizes = [(before["elastic/world_size"], after["elastic/world_size"]) for before, after in patient.find_changes()]
    assert sizes == [(SLOTS, SLOTS - URGENT_SLOTS), (SLOTS - URGENT_SLOTS, SLOTS)]
    assert "resize 4 -> 2 workers: run urgent0 of priority 5 has the devices" in patient.output
    assert "resize 2 -> 4 workers: run urgent0 of priority 5 has given devices back" in patient.output
    assert not (patient.directory / "incidents.jsonl").exists(), "a hand-over is no failure"
    hand_over = shared.measure(urgent)
    assert hand_over.over_s <= MAX_HAND_OVER_S and hand_over.back_s <= MAX_HAND_OVER_S, hand_over
    metrics = patient.read_metrics()
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1)), "no step is lost"
    reference = train_in_one_process(pool, shared.directory / "one", len(metrics))
    assert patient.read_curve(len(metrics)) == reference
    assert urgent.read_curve(URGENT_STEPS) == reference[:URGENT_STEPS]
