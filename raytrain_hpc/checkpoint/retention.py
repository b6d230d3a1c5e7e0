"""Retention: which checkpoints are kept, by their steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


def select_kept_steps(steps: Iterable[int], keep: int, fallback_steps: Iterable[int]) -> set[int]:
    """Return the newest `keep` of these steps and, for each of `fallback_steps`, the newest one that is not later.

    A fault that the next audit finds leads back to the state after a fallback step, or before it.
    """
    ascending = sorted(set(steps))
    numbers = (bisect_right(ascending, fallback_step) for fallback_step in fallback_steps)
    return {*ascending[-keep:], *(ascending[number - 1] for number in numbers if number)}
