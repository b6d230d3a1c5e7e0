"""When a worker is given up on, and which rank is to blame where many stand still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.elastic.fault_attribution import CollectiveCall, attribute_fault, describe_pending_call
from raytrain_hpc.elastic.watchdog import (
    Suspect,
    SuspectKind,
    Timeouts,
    WorkerHealth,
    compute_timeouts,
    find_lost_nodes,
    find_stragglers,
    find_suspects,
    is_deadlocked,
)

WELL = WorkerHealth(0, True, False, 0.05, 0.1, "training", 12, 0.2)
BOUNDS = Timeouts(0.6, 1.0, 300.0)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, None),
        ({"frozen": True, "beat_age_s": 0.5}, None),
        ({"frozen": True, "beat_age_s": 0.7}, "frozen"),
        ({"beat_age_s": 0.9, "progress_age_s": 0.9}, None),
        ({"beat_age_s": 1.1, "progress_age_s": 1.1}, "interpreter held"),
        ({"progress_age_s": 1.1}, "stalled"),
        ({"progress_age_s": 200.0, "phase": "saving"}, None),
        ({"progress_age_s": 200.0, "phase": "loading"}, None),
        ({"progress_age_s": 200.0, "phase": "evaluating"}, None),
        ({"progress_age_s": 301.0, "phase": "building"}, "stalled"),
        ({"progress_age_s": 1e6, "phase": "idle"}, None),
        ({"alive": False, "beat_age_s": 9.0}, None),
    ],
)
def test_what_counts_as_a_silence(change: dict, kind: SuspectKind | None) -> None:
    found = find_suspects([WELL, replace(WELL, rank=1, **change)], BOUNDS)
    assert [one.kind for one in found] == ([] if kind is None else [kind])
    assert all(one.rank == 1 for one in found)


def test_who_waits_for_a_frozen_one_is_not_named_beside_it() -> None:
    waiting = [replace(WELL, rank=rank, progress_age_s=1.5) for rank in (0, 2)]
    frozen = replace(WELL, rank=1, is_frozen=True, heartbeat_age_s=1.5, progress_age_s=1.5)
    assert find_suspects([*waiting, frozen], BOUNDS) == [Suspect(1, "frozen", 1.5, 0.6)]
    assert len(find_suspects(waiting, BOUNDS)) == 2


def test_limits_follow_the_steps_and_come_in_order() -> None:
    auto = load_config(None, [])
    for steps in ([], [0.01] * 3, [0.5, 2.0, 1.0], [40.0]):
        bounds = compute_timeouts(auto, steps)
        assert bounds.heartbeat_s < bounds.stall_s <= bounds.slow_phase_s
    assert compute_timeouts(auto, [0.01]).stall_s == 0.8
    assert compute_timeouts(auto, [0.5, 2.0, 1.0]).stall_s == 2.7
    assert compute_timeouts(auto, []).stall_s == 300.0
    chosen = compute_timeouts(load_config(None, ["fault.stall_timeout=0.3"]), [5.0])
    assert chosen.stall_s == 0.3 and chosen.heartbeat_s <= 0.3


def test_a_node_is_given_up_on_sooner_where_ranks_are_gone_too() -> None:
    silent = {"a": 0.2, "b": 0.7, "c": 12.0}
    assert find_lost_nodes(silent, has_lost_ranks=True) == ["b", "c"] and find_lost_nodes(
        silent, has_lost_ranks=False
    ) == ["c"]
    assert find_lost_nodes(silent, has_lost_ranks=True, dead_nodes=["a"]) == ["a", "b", "c"], (
        "it need not be waited for"
    )


def looks(*waiting: int, of: int = 100, steps: int = 20) -> dict[int, WorkerHealth]:
    """What was seen of ranks that waited in so many of these looks."""
    return {
        rank: replace(WELL, rank=rank, num_samples=of, num_waiting_samples=count, step=steps)
        for rank, count in enumerate(waiting)
    }


EVEN = [1, 1, 1]


def test_who_keeps_the_others_waiting() -> None:
    before = looks(0, 0, 0, of=0, steps=0)
    assert find_stragglers(before, looks(70, 10, 70), 2.0, EVEN) == {1: pytest.approx(3.0)}
    assert find_stragglers(before, looks(30, 10, 30), 2.0, EVEN) == {}
    assert find_stragglers(before, looks(20, 20, 20), 2.0, EVEN) == {}, "all work as much as each other"
    assert find_stragglers(before, looks(90, 0), 2.0, EVEN) == {1: pytest.approx(10.0)}
    assert find_stragglers(before, looks(100, 0, 100), 2.0, EVEN) == {1: pytest.approx(40.0)}, "whose others only wait"
    assert find_stragglers({}, looks(70, 10, 70), 2.0, EVEN) is None, "nothing to compare with"
    assert find_stragglers(before, looks(30, 5, 30, of=39), 2.0, EVEN) is None, "too few looks"
    assert find_stragglers(before, looks(70, 10, 70, steps=4), 2.0, EVEN) is None, "too few steps"
    assert find_stragglers(before, looks(0, of=100), 2.0, EVEN) == {}, "alone"


def test_who_has_more_to_do_is_not_slow_for_it() -> None:
    before = looks(0, 0, 0, of=0, steps=0)
    assert find_stragglers(before, looks(70, 10, 70), 2.0, [1, 3, 1]) == {}
    assert find_stragglers(before, looks(10, 10, 10), 2.0, [9, 3, 9]) == {1: pytest.approx(3.0)}, (
        "given less, and still slow"
    )


def calls(text: str, group: str = "0") -> list[CollectiveCall]:
    """ "a b *c" -> three calls, the last one pending."""
    return [
        CollectiveCall(group, number, word.strip("*"), word.startswith("*"))
        for number, word in enumerate(text.split(), 1)
    ]


def test_who_is_in_no_collective_while_others_wait() -> None:
    told = attribute_fault({0: calls("a a *b"), 1: calls("a a"), 2: calls("a a *b")})
    assert told is not None and told.ranks == (1,) and told.operation.startswith("b, number 3 of group 0")
    assert told.kind == "stalled"
    assert attribute_fault({0: calls("a *b"), 1: calls("a *b")}) is None, "all wait: for somebody who said nothing"
    assert attribute_fault({0: calls("a a"), 1: calls("a a")}) is None


def test_who_skipped_one() -> None:
    told = attribute_fault({0: calls("a b *c"), 1: calls("a *c"), 2: calls("a b *c")})
    assert told is not None and told.ranks == (1,) and "called c instead" in told.operation
    assert told.kind == "out of step"
    told = attribute_fault({0: calls("a a a *a"), 1: calls("a a *a"), 2: calls("a a a *a")})
    assert told is not None and told.ranks == (1,) and "stands in number 3" in told.operation


def test_who_took_them_in_another_order() -> None:
    told = attribute_fault({0: calls("a b *c"), 1: calls("a b *c"), 2: calls("b *a")})
    assert told is not None and told.ranks == (2,)


def test_two_against_two_is_no_majority() -> None:
    assert attribute_fault({0: calls("a *b"), 1: calls("a *b"), 2: calls("a *c"), 3: calls("a *c")}) is None


def test_one_against_one_is_told_by_what_steps_were_like() -> None:
    told = attribute_fault({0: calls("x y z x y z x *x"), 1: calls("x y z x y z x *y")})
    assert told is not None and (told.kind, told.ranks) == ("out of step", (0,))
    assert told.operation == "y, number 8 of group 0; called x after x"
    assert attribute_fault({0: calls("x *x"), 1: calls("x *y")}) is None, "too early to know what is usual"
    assert attribute_fault({0: calls("x y x *y"), 1: calls("x y x *y")}) is None


def test_all_that_stand_still_for_long_are_not_waited_for() -> None:
    still = [Suspect(rank, "stalled", 4.5, 1.0) for rank in range(3)]
    assert is_deadlocked(still, 3)
    assert not is_deadlocked(still, 4), "somebody still moves"
    assert not is_deadlocked([*still[:2], Suspect(2, "stalled", 3.0, 1.0)], 3)


def test_waiting_in_another_group_for_one_who_waits() -> None:
    records = {
        0: [*calls("a"), *calls("*x", "1")],
        1: [*calls("a"), *calls("*x", "1")],
        2: calls("a"),
        3: [*calls("a"), *calls("*x", "2")],
    }
    told = attribute_fault(records)
    assert told is not None and told.ranks == (2,)


def test_what_others_stood_in() -> None:
    assert describe_pending_call({0: calls("a b *c"), 1: calls("a b")}) == "c, number 3 of group 0"
    assert describe_pending_call({0: calls("a b")}) == "b, number 2 of group 0"
    assert describe_pending_call({}) == ""
