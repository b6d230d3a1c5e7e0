"""What a run reports to the coordinator of the runs on its cluster, and what that concludes from it. Without Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.cluster_monitor import ClusterSnapshot, NodeSlots
from raytrain_hpc.driver.coordinator_client import build_claim
from raytrain_hpc.driver.run_coordinator import CLAIM_TTL_S, ClaimTable
from raytrain_hpc.elastic.device_allocation import UNLIMITED, Allowance, DeviceClaim


def claim(
    words: list[str], held: int | None = None, wanted: int | None = None, fixed: int | None = None
) -> DeviceClaim:
    config = load_config(None, ["train.global_batch_size=24", "run.name=mine", *words])
    snapshot = ClusterSnapshot((NodeSlots("n0", 4, 1), NodeSlots("n1", 4, 4)), 0.0, "GPU", fixed)
    return build_claim(config, snapshot, run_id="a", since=1.0, held=held, wanted=wanted)


@pytest.mark.parametrize(
    ("words", "held", "wanted", "fixed", "bounds"),
    [
        ([], None, None, None, (1, None)),
        (["cluster.min_workers=2", "cluster.max_workers=6", "cluster.spares=1"], None, None, None, (2, 7)),
        (["cluster.spares=1"], None, None, None, (2, None)),  # to start; it gives its spare up later
        (["cluster.spares=1"], 4, None, None, (1, None)),
        ([], 4, 3, None, (1, 3)),  # resized
        (["cluster.workers=4"], None, None, 4, (4, 4)),
        (["cluster.workers=4", "cluster.min_workers=2"], None, None, 4, (2, 4)),
        (["cluster.workers=4", "cluster.min_workers=2"], 3, 4, 4, (3, 4)),  # it does not shrink
        (["cluster.workers=4", "cluster.spares=1"], 5, 4, 4, (5, 5)),
    ],
)
def test_bounds_of_a_claim(
    words: list[str], held: int | None, wanted: int | None, fixed: int | None, bounds: tuple[int, int | None]
) -> None:
    claimed = claim(words, held, wanted, fixed)
    assert (claimed.minimum, claimed.maximum) == bounds
    assert (claimed.held, claimed.is_started) == (held or 0, held is not None)


def test_a_claim_tells_what_the_cluster_has() -> None:
    claimed = claim(["parallel.tp=2", "parallel.pp=2", "model.num_layers=4", "cluster.priority=3"])
    assert (claimed.name, claimed.priority, claimed.resource) == ("mine", 3, "GPU")
    assert (claimed.total, claimed.free, claimed.group_size, claimed.group_size_per_node) == (8, 5, 4, 2)


LOW = DeviceClaim("low", "low", 0, 100.0, 1, held=4, is_started=True, total=4)
HIGH = DeviceClaim("high", "high", 5, 105.0, 2, 2, total=4)


def test_a_run_of_higher_priority_comes_and_dies() -> None:
    table = ClaimTable(100.0)
    assert table.update(LOW, 100.1) == UNLIMITED
    assert table.update(HIGH, 105.0) == Allowance(2)
    assert table.update(LOW, 105.2) == Allowance(2, "run high of priority 5")
    table.update(LOW, 105.2 + CLAIM_TTL_S)
    table.expire(105.1 + CLAIM_TTL_S)
    assert table.update(LOW, 109.0) == UNLIMITED


def test_a_coordinator_that_replaces_another_one_waits_for_all_reports() -> None:
    table = ClaimTable(500.0)
    assert table.update(LOW, 500.1) is None, "a higher run may hold devices"
    table.update(replace(HIGH, held=2, is_started=True), 500.3)
    assert table.update(replace(LOW, held=2), 502.0) == Allowance(2, "run high of priority 5")


def test_devices_of_other_jobs_are_not_given() -> None:
    table = ClaimTable(100.0)
    table.update(LOW, 104.0)
    table.update(replace(LOW, held=2), 104.5)
    assert table.update(HIGH, 105.0) == Allowance(2), "Ray reports late that the slots are free"
    for tenths in range(60):
        table.update(replace(LOW, held=2), 105.0 + tenths / 10)
    assert table.update(replace(LOW, held=2), 111.5) == Allowance(2), "the minimum of the higher run does not fit"
    assert table.update(replace(HIGH, minimum=1), 111.6) == Allowance(1)
