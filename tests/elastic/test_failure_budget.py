"""Failure policy: failures and preemptions in a row, each with a limit of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.elastic.failure_budget import (
    PREEMPTED,
    FailureCount,
    ProgramError,
    count_failure,
    find_exceeded_limit,
)


def count_all(text: str) -> FailureCount:
    """Return the count after these failures: "died:3 preempted:3" happened after three steps each."""
    count = FailureCount()
    for word in text.split():
        kind, step = word.split(":")
        count = count_failure(count, kind, int(step))
    return count


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ("died:3", (1, 0)),
        ("died:3 died:3", (2, 0)),
        ("died:3 died:2 died:3", (3, 0)),
        ("died:3 died:4", (1, 0)),
        ("preempted:3 preempted:3 died:3", (1, 2)),
        ("died:3 died:3 preempted:4", (0, 1)),
    ],
)
def test_failures_and_preemptions_are_counted_apart(failures: str, expected: tuple[int, int]) -> None:
    count = count_all(failures)
    assert (count.failures, count.preemptions) == expected


def test_limits() -> None:
    config = load_config(None, ["fault.max_failures=1", "fault.max_preemptions=2"])
    assert find_exceeded_limit(config, FailureCount(1, 2)) is None
    assert find_exceeded_limit(config, FailureCount(2, 0)) == "2 failures (fault.max_failures=1)"
    assert find_exceeded_limit(config, FailureCount(0, 3)) == "3 preemptions (fault.max_preemptions=2)"
    assert find_exceeded_limit(load_config(), FailureCount(0, 1000)) is None
    assert PREEMPTED == "preempted", "documented in docs/fault_tolerance.md"


BEFORE_ANY_STEP = ProgramError("TypeError: no", on_all_ranks=True, step=0, has_trained=False)
ON_ONE_RANK = ProgramError("KeyError: Row 0x7f01>", on_all_ranks=False, step=5, has_trained=True)


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([BEFORE_ANY_STEP], "an exception on all ranks before the first step ("),
        ([replace(BEFORE_ANY_STEP, on_all_ranks=False)], None),
        ([replace(BEFORE_ANY_STEP, has_trained=True)], None),
        ([ON_ONE_RANK], None),
        (
            [ON_ONE_RANK, replace(ON_ONE_RANK, reason="KeyError: Row 0x7f22>")],
            "the same exception twice in step 6 (",
        ),
        ([ON_ONE_RANK, replace(ON_ONE_RANK, step=6)], None),
        ([ON_ONE_RANK, replace(ON_ONE_RANK, reason="KeyError: 3")], None),
        ([ON_ONE_RANK, None, ON_ONE_RANK], None),
    ],
)
def test_exceptions_that_would_be_raised_again(errors: list[ProgramError | None], expected: str | None) -> None:
    count = FailureCount()
    for error in errors:
        count = count_failure(count, "raised", error.step if error else 5, error)
    exceeded = find_exceeded_limit(load_config(), count)
    assert exceeded is None if expected is None else str(exceeded).startswith(expected)
