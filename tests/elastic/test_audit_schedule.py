"""The schedule of audits: every ordered pair of ranks meets in time, all microbatches are chosen, and it is fixed."""

from __future__ import annotations

from collections import Counter

import pytest

from raytrain_hpc.elastic.audit_schedule import AuditSchedule, choose_interval, count_ranks_per_unit
from raytrain_hpc.elastic.load_balancing import UnevenBatching
from raytrain_hpc.planner.layout import Batching, Layout


def make_schedule(num_ranks: int, *, interval: int = 1, count: int = 0, ranks_per_unit: int = 1) -> AuditSchedule:
    microbatches = Batching(count or 3 * num_ranks, 1).split_by_rank(num_ranks)
    return AuditSchedule(interval, 1234, tuple(microbatches), ranks_per_unit)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("interval", [1, 5])
def test_every_ordered_pair_meets_once_in_a_period(num_ranks: int, interval: int) -> None:
    schedule = make_schedule(num_ranks, interval=interval)
    steps = [step for step in range(400) if schedule.is_due(step)]
    assert steps == list(range(interval - 1, 400, interval))
    numbers = {step: (step + 1) // interval for step in steps}
    for period in range(1, 4):
        in_period = [step for step in steps if numbers[step] // (num_ranks - 1) == period]
        pairs = Counter((r, schedule.plan(step).get_owner(r)) for step in in_period for r in range(num_ranks))
        assert pairs == {(a, b): 1 for a in range(num_ranks) for b in range(num_ranks) if a != b}


def test_every_microbatch_of_uneven_splits_is_audited() -> None:
    microbatches = tuple(UnevenBatching(9, 2, (1, 5, 3)).split_by_rank(3))
    schedule = AuditSchedule(2, 7, microbatches)
    seen = Counter((owner, m) for step in range(1, 400, 2) for owner, m in enumerate(schedule.plan(step).microbatches))
    assert set(seen) == {(owner, m) for owner, of_owner in enumerate(microbatches) for m in of_owner}
    assert min(seen.values()) > 20  # of 200 audits, 40 are expected for each of the five


def test_ranks_that_share_experts_audit_those_of_another_unit_at_the_same_place() -> None:
    schedule = make_schedule(6, ranks_per_unit=2)
    assert {schedule.plan(step).shift for step in range(20)} == {2, 4}
    assert schedule.list_arbitration_shifts(schedule.plan(3)) == [0, schedule.plan(3).shift, 6 - schedule.plan(3).shift]
    alone = make_schedule(4, ranks_per_unit=4)  # one unit: other ranks of the unit
    assert {alone.plan(step).shift for step in range(20)} == {1, 2, 3}


def test_a_single_rank_repeats_its_own_microbatches_and_two_have_no_third() -> None:
    single, pair = make_schedule(1), make_schedule(2)
    assert single.plan(0).shift == 0 and single.list_arbitration_shifts(single.plan(0)) == [0, 0]
    assert pair.list_arbitration_shifts(pair.plan(0)) == [0, 1]


def test_schedule_keeps_its_golden_values() -> None:
    """A resumed run must audit the same microbatches."""
    schedule = make_schedule(5, interval=10)
    audits = [schedule.plan(step) for step in (9, 19, 29, 39)]
    assert [(audit.shift, audit.microbatches) for audit in audits] == [
        (4, (1, 3, 8, 11, 14)),
        (2, (0, 3, 8, 10, 13)),
        (3, (0, 4, 6, 10, 12)),
        (3, (2, 4, 6, 11, 13)),
    ]


def test_interval_can_change_after_an_audit() -> None:
    """Audits are counted on, so that every ordered pair still meets in time."""
    schedule, audited = make_schedule(4, interval=10), list[int]()
    for step in range(100):
        if schedule.is_due(step):
            audited.append(step)
            numbers = [schedule.plan(audited_step).number for audited_step in audited[-1:]]
            assert numbers == [len(audited)]
        if step == 30:
            schedule.set_interval(29, 7)
            assert schedule.is_due(29) and not schedule.is_due(30)
        if step == 52:
            schedule.set_interval(50, 20)
    assert audited == [9, 19, 29, 36, 43, 50, 70, 90]


def test_auto_costs_at_most_a_percent() -> None:
    assert choose_interval(0, [range(2)]) == 0
    assert choose_interval(17, [range(2)]) == 17
    assert choose_interval("auto", [range(1), range(1, 2)]) == 225
    assert choose_interval("auto", [range(4), range(4, 8)]) == 132
    assert choose_interval("auto", [range(1000)]) == 101


def test_ranks_per_unit_are_those_among_which_experts_are_split() -> None:
    assert count_ranks_per_unit(Layout(dp_replicate=4)) == 1
    assert count_ranks_per_unit(Layout(dp_replicate=4, ep=2)) == 2
    assert count_ranks_per_unit(Layout(dp_replicate=2, cp=2, ep=2)) == 1
    assert count_ranks_per_unit(Layout(dp_replicate=2, cp=2, ep=4)) == 2
