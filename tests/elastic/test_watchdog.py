"""Watchdog and fault attribution: when a worker is a suspect, and which rank caused a hang."""

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
    exclude_waiting,
    find_lost_nodes,
    find_stragglers,
    find_suspects,
    is_deadlocked,
    is_waiting_for_busy_rank,
)

HEALTHY = WorkerHealth(0, True, False, 0.05, 0.1, "training", 12, 0.2)
TIMEOUTS = Timeouts(0.6, 1.0, 300.0)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, None),
        ({"is_frozen": True, "heartbeat_age_s": 0.5}, None),
        ({"is_frozen": True, "heartbeat_age_s": 0.7}, "frozen"),
        ({"heartbeat_age_s": 0.9, "progress_age_s": 0.9}, None),
        ({"heartbeat_age_s": 1.1, "progress_age_s": 1.1}, "interpreter held"),
        ({"progress_age_s": 1.1}, "stalled"),
        ({"progress_age_s": 200.0, "phase": "saving"}, None),
        ({"progress_age_s": 200.0, "phase": "loading"}, None),
        ({"progress_age_s": 200.0, "phase": "evaluating"}, None),
        ({"progress_age_s": 301.0, "phase": "building"}, "stalled"),
        ({"progress_age_s": 1e6, "phase": "idle"}, None),
        ({"is_alive": False, "heartbeat_age_s": 9.0}, None),
    ],
)
def test_timeouts_decide_which_workers_are_suspects(change: dict, kind: SuspectKind | None) -> None:
    suspects = find_suspects([HEALTHY, replace(HEALTHY, rank=1, **change)], TIMEOUTS)
    assert [suspect.kind for suspect in suspects] == ([] if kind is None else [kind])
    assert all(suspect.rank == 1 for suspect in suspects)


def test_ranks_waiting_for_a_frozen_rank_are_not_suspects() -> None:
    waiting = [replace(HEALTHY, rank=rank, progress_age_s=1.5) for rank in (0, 2)]
    frozen = replace(HEALTHY, rank=1, is_frozen=True, heartbeat_age_s=1.5, progress_age_s=1.5)
    assert find_suspects([*waiting, frozen], TIMEOUTS) == [Suspect(1, "frozen", 1.5, 0.6)]
    assert len(find_suspects(waiting, TIMEOUTS)) == 2


def test_ranks_waiting_for_one_that_loads_data_are_not_suspects() -> None:
    """Nor until it has had the time of a timeout to catch up. A rank that loads for too long is a suspect itself."""
    waiting = [replace(HEALTHY, rank=rank, progress_age_s=4.0) for rank in (0, 2)]
    for phase, progress_age_s, is_waiting in (
        ("loading", 4.0, True),
        ("loading", 301.0, False),
        ("callback", 4.0, True),
        ("callback", 301.0, False),
        ("training", 0.2, False),
    ):
        workers = [*waiting, replace(HEALTHY, rank=1, phase=phase, progress_age_s=progress_age_s)]
        assert is_waiting_for_busy_rank(find_suspects(workers, TIMEOUTS), workers) == is_waiting
    suspects = find_suspects(waiting, TIMEOUTS)
    assert exclude_waiting(suspects, 0.9) == [] and exclude_waiting(suspects, 1.1) == suspects
    frozen = Suspect(1, "frozen", 1.5, 0.6)
    assert exclude_waiting([frozen], 0.0) == [frozen]
    workers = [replace(HEALTHY, rank=0, phase="loading")]
    assert not is_waiting_for_busy_rank([frozen], workers) and not is_waiting_for_busy_rank([], workers)


def test_timeouts_follow_step_times_and_are_ordered() -> None:
    auto = load_config(None, [])
    for steps in ([], [0.01] * 3, [0.5, 2.0, 1.0], [40.0]):
        timeouts = compute_timeouts(auto, steps)
        assert timeouts.heartbeat_s < timeouts.stall_s <= timeouts.slow_phase_s
    assert compute_timeouts(auto, [0.01]).stall_s == 0.8
    assert compute_timeouts(auto, [0.5, 2.0, 1.0]).stall_s == 2.7
    assert compute_timeouts(auto, []).stall_s == 300.0
    timeouts = compute_timeouts(load_config(None, ["fault.stall_timeout=0.3"]), [5.0])
    assert timeouts.stall_s == 0.3 and timeouts.heartbeat_s <= 0.3


def test_a_node_times_out_sooner_if_ranks_have_failed() -> None:
    silent_s = {"a": 0.2, "b": 0.7, "c": 12.0}
    assert find_lost_nodes(silent_s, has_lost_ranks=True) == ["b", "c"] and find_lost_nodes(
        silent_s, has_lost_ranks=False
    ) == ["c"]
    assert find_lost_nodes(silent_s, has_lost_ranks=True, dead_nodes=["a"]) == ["a", "b", "c"], (
        "a dead node needs no timeout"
    )


def make_health(*waiting: int, num_samples: int = 100, step: int = 20) -> dict[int, WorkerHealth]:
    """Return one health sample per rank, in which rank r was waiting in `waiting[r]` of `num_samples` stack samples."""
    return {
        rank: replace(HEALTHY, rank=rank, num_samples=num_samples, num_waiting_samples=count, step=step)
        for rank, count in enumerate(waiting)
    }


EVEN_LOAD = [1, 1, 1]


def test_stragglers_are_the_ranks_that_wait_least() -> None:
    before = make_health(0, 0, 0, num_samples=0, step=0)
    assert find_stragglers(before, make_health(70, 10, 70), 2.0, EVEN_LOAD) == {1: pytest.approx(3.0)}
    assert find_stragglers(before, make_health(30, 10, 30), 2.0, EVEN_LOAD) == {}
    assert find_stragglers(before, make_health(20, 20, 20), 2.0, EVEN_LOAD) == {}, "all ranks are equally fast"
    assert find_stragglers(before, make_health(90, 0), 2.0, EVEN_LOAD) == {1: pytest.approx(10.0)}
    assert find_stragglers(before, make_health(100, 0, 100), 2.0, EVEN_LOAD) == {1: pytest.approx(40.0)}, (
        "the other ranks only wait"
    )
    assert find_stragglers({}, make_health(70, 10, 70), 2.0, EVEN_LOAD) is None, "no earlier sample"
    assert find_stragglers(before, make_health(30, 5, 30, num_samples=39), 2.0, EVEN_LOAD) is None, "too few samples"
    assert find_stragglers(before, make_health(70, 10, 70, step=4), 2.0, EVEN_LOAD) is None, "too few steps"
    assert find_stragglers(before, make_health(0, num_samples=100), 2.0, EVEN_LOAD) == {}, "a single rank"


def test_a_rank_with_more_microbatches_is_not_a_straggler() -> None:
    before = make_health(0, 0, 0, num_samples=0, step=0)
    assert find_stragglers(before, make_health(70, 10, 70), 2.0, [1, 3, 1]) == {}
    assert find_stragglers(before, make_health(10, 10, 10), 2.0, [9, 3, 9]) == {1: pytest.approx(3.0)}, (
        "slow in spite of fewer microbatches"
    )


def parse_calls(text: str, group: str = "0") -> list[CollectiveCall]:
    """Return one call per word: "a b *c" are three calls of which the last one is pending."""
    return [
        CollectiveCall(group, number, word.strip("*"), word.startswith("*"))
        for number, word in enumerate(text.split(), 1)
    ]


def test_a_rank_in_no_collective_is_stalled() -> None:
    fault = attribute_fault({0: parse_calls("a a *b"), 1: parse_calls("a a"), 2: parse_calls("a a *b")})
    assert fault is not None and fault.ranks == (1,) and fault.operation.startswith("b, number 3 of group 0")
    assert fault.kind == "stalled"
    assert attribute_fault({0: parse_calls("a *b"), 1: parse_calls("a *b")}) is None, "all ranks with records wait"
    assert attribute_fault({0: parse_calls("a a"), 1: parse_calls("a a")}) is None


def test_a_skipped_collective_is_attributed() -> None:
    fault = attribute_fault({0: parse_calls("a b *c"), 1: parse_calls("a *c"), 2: parse_calls("a b *c")})
    assert fault is not None and fault.ranks == (1,) and "called c instead" in fault.operation
    assert fault.kind == "out of step"
    fault = attribute_fault({0: parse_calls("a a a *a"), 1: parse_calls("a a *a"), 2: parse_calls("a a a *a")})
    assert fault is not None and fault.ranks == (1,) and "waits in number 3" in fault.operation


def test_collectives_in_another_order_are_attributed() -> None:
    fault = attribute_fault({0: parse_calls("a b *c"), 1: parse_calls("a b *c"), 2: parse_calls("b *a")})
    assert fault is not None and fault.ranks == (2,)


def test_two_ranks_against_two_are_not_attributed() -> None:
    assert (
        attribute_fault(
            {0: parse_calls("a *b"), 1: parse_calls("a *b"), 2: parse_calls("a *c"), 3: parse_calls("a *c")}
        )
        is None
    )


def test_one_rank_against_one_is_attributed_by_earlier_steps() -> None:
    fault = attribute_fault({0: parse_calls("x y z x y z x *x"), 1: parse_calls("x y z x y z x *y")})
    assert fault is not None and (fault.kind, fault.ranks) == ("out of step", (0,))
    assert fault.operation == "y, number 8 of group 0; called x after x"
    assert attribute_fault({0: parse_calls("x *x"), 1: parse_calls("x *y")}) is None, (
        "too few calls to know the usual order"
    )
    assert attribute_fault({0: parse_calls("x y x *y"), 1: parse_calls("x y x *y")}) is None


def test_all_ranks_stalled_for_long_are_deadlocked() -> None:
    suspects = [Suspect(rank, "stalled", 4.5, 1.0) for rank in range(3)]
    assert is_deadlocked(suspects, 3)
    assert not is_deadlocked(suspects, 4), "one rank still makes progress"
    assert not is_deadlocked([*suspects[:2], Suspect(2, "stalled", 3.0, 1.0)], 3)


def test_a_rank_in_no_collective_is_stalled_when_others_wait_in_several_groups() -> None:
    records = {
        0: [*parse_calls("a"), *parse_calls("*x", "1")],
        1: [*parse_calls("a"), *parse_calls("*x", "1")],
        2: parse_calls("a"),
        3: [*parse_calls("a"), *parse_calls("*x", "2")],
    }
    fault = attribute_fault(records)
    assert fault is not None and fault.ranks == (2,)


def test_the_first_pending_call_is_described() -> None:
    assert describe_pending_call({0: parse_calls("a b *c"), 1: parse_calls("a b")}) == "c, number 3 of group 0"
    assert describe_pending_call({0: parse_calls("a b")}) == "b, number 2 of group 0"
    assert describe_pending_call({}) == ""
