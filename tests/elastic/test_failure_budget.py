"""Failure policy: failures and preemptions in a row, each with a limit of its own."""

from __future__ import annotations

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.elastic.failure_budget import PREEMPTED, FailureCount, count_failure, find_exceeded_limit


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
