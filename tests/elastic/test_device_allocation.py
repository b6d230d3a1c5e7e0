"""Policy of runs that share a cluster: who may hold how many devices, and what is asked of an autoscaler."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from raytrain_hpc.elastic.device_allocation import (
    UNLIMITED,
    Allowance,
    DeviceClaim,
    allocate_devices,
    count_foreign_devices,
    find_allowance,
    list_all_bundles,
)


def parse_claims(text: str) -> list[DeviceClaim]:
    """Return one claim per word, in the order in which they came: "a5:2-4/3" has priority 5, bounds and held devices.

    Without "/3" the run has not started; "2-" has no upper bound.
    """
    claims = []
    for number, word in enumerate(text.split()):
        head, _, held = word.partition("/")
        name, _, bounds = head.partition(":")
        minimum, _, maximum = bounds.partition("-")
        claims.append(
            DeviceClaim(
                name[0],
                name[0],
                int(name[1:]),
                float(number),
                int(minimum),
                int(maximum) if maximum else None,
                int(held or 0),
                bool(held),
            )
        )
    return claims


def allocate(devices: int, text: str) -> str:
    return " ".join(
        f"{run_id}{count}" for run_id, count in sorted(allocate_devices(devices, parse_claims(text)).items())
    )


@pytest.mark.parametrize(
    ("devices", "claims", "shares"),
    [
        (4, "a0:1-/4 b5:2-2", "a2 b2"),  # the higher one gets what it can use
        (4, "a0:1-/2 b5:2-/2", "a1 b3"),
        (4, "a0:3-/4 b5:2-2", "a4 b0"),  # its minimum does not fit: nobody shrinks for nothing
        (4, "a0:2-/2 b5:2-2/2", "a2 b2"),
        (4, "a5:1-/4 b0:1-1", "a4 b0"),  # a lower one waits
        (6, "a5:1-4/4 b0:1-", "a4 b2"),
        (4, "a0:1-/4 b0:1-", "a4 b0"),  # of one priority, the first keeps what it has
        (6, "a0:1-/4 b0:1-", "a5 b1"),  # what is free goes first to the minimum of one that waits
        (6, "a0:1-/4 b0:1-/2", "a4 b2"),
        (1, "a0:2-/2 b5:1-", "a2 b0"),  # lost devices: what has started keeps its minimum
        (4, "a0:1-1/1 b5:1-2/3", "a1 b3"),  # what no run can use stays, such as spares after a resize
        (4, "a0:1-/1 b5:1-2/3", "a2 b2"),  # until another one can
        (9, "a0:1-/3 b5:2-/3 c9:4-4", "a1 b4 c4"),
        (0, "a0:1-", "a0"),
    ],
)
def test_shares(devices: int, claims: str, shares: str) -> None:
    assert allocate(devices, claims) == shares


def test_only_sizes_that_a_run_can_use_are_given() -> None:
    """What a run of whole replicas cannot use goes to the next."""
    big = DeviceClaim("a", "a", 5, 0.0, minimum=4, group_size=4, spares=1, is_started=True, held=5)
    small = DeviceClaim("b", "b", 0, 1.0, minimum=1)
    assert allocate_devices(12, [big, small]) == {"a": 9, "b": 3}
    assert [big.round_down(devices) for devices in (3, 4, 7, 8, 9, 12, 13)] == [0, 4, 5, 5, 9, 9, 13]


def make_random_claims(rng: random.Random) -> list[DeviceClaim]:
    claims = []
    for number in range(rng.randint(1, 6)):
        minimum, is_started = rng.randint(1, 6), rng.random() < 0.6
        claims.append(
            DeviceClaim(
                str(number),
                str(number),
                rng.randint(0, 2),
                float(number),
                minimum,
                rng.choice([None, minimum, minimum + rng.randint(0, 8)]),
                held=rng.randint(minimum, minimum + 6) if is_started else 0,
                is_started=is_started,
            )
        )
    return claims


def test_properties_of_every_allocation() -> None:
    for seed in range(300):
        check_allocation(random.Random(seed))


def check_allocation(rng: random.Random) -> None:
    claims, devices = make_random_claims(rng), rng.randint(0, 24)
    shares = allocate_devices(devices, claims)
    minima = sum(claim.minimum for claim in claims if claim.is_started)
    assert sum(shares.values()) <= max(devices, minima), "no device is given twice"
    for claim in claims:
        share = shares[claim.run_id]
        assert share >= claim.minimum or (share == 0 and not claim.is_started), "never below the minimum"
    rng.shuffle(claims)
    assert allocate_devices(devices, claims) == shares, "the order of reports does not matter"
    # When all runs hold what they were given, nothing more changes.
    settled = [
        replace(claim, held=shares[claim.run_id], is_started=True) if shares[claim.run_id] else claim
        for claim in claims
    ]
    if minima <= devices:
        assert allocate_devices(devices, settled) == shares
    raised = rng.choice(claims)
    others = [replace(claim, priority=9) if claim is raised else claim for claim in claims]
    assert allocate_devices(devices, others)[raised.run_id] >= shares[raised.run_id], "more priority, no fewer devices"


def test_the_message_names_the_run_that_has_the_devices() -> None:
    claims = parse_claims("a0:1-/4 b5:2-2 c7:1-1")
    assert find_allowance(4, claims, "a") == Allowance(1, "run b of priority 5")
    assert find_allowance(4, claims, "b") == Allowance(2)
    assert find_allowance(4, claims[:1], "a") == UNLIMITED, "a run alone has no limit"


def test_devices_of_other_jobs() -> None:
    claims = [replace(claim, total=8, free=1) for claim in parse_claims("a0:1-/2 b0:1-/3")]
    assert count_foreign_devices(claims) == 2
    assert count_foreign_devices([replace(claim, free=5) for claim in claims]) == 0


def test_the_autoscaler_is_asked_for_all_runs_together() -> None:
    """A bundle is a tensor-parallel group. A run that another one has priority over asks for what it may hold."""
    groups = DeviceClaim("a", "a", 5, 0.0, 4, requested=6, group_size_per_node=4, resource="GPU")
    low = DeviceClaim("b", "b", 0, 1.0, 2, requested=5, unit=3)
    wide = [{"GPU": 4.0}] * 2
    assert list_all_bundles([low, groups], {}) == [*wide, *[{"CPU": 3.0}] * 5]
    limits = {"b": Allowance(3, "run a of priority 5")}
    assert list_all_bundles([low, groups], limits) == [*wide, *[{"CPU": 3.0}] * 3]
    assert list_all_bundles([low], {"b": Allowance(0, "run a of priority 5")}) == [{"CPU": 3.0}] * 2, "it still starts"
    assert list_all_bundles([low], {"b": Allowance(3)}) == [{"CPU": 3.0}] * 5, "a small cluster may grow"
