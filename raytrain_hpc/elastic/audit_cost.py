"""Cost of audits, measured while a run trains, and the interval between audits that follows from it."""

from __future__ import annotations

from collections import deque
from math import ceil
from statistics import median

from raytrain_hpc.elastic.audit_schedule import MAX_AUTO_COST, PASSES_COST

_MIN_INTERVAL = 4  # steps: others are needed to compare with
_NUM_AUDITS, _NUM_STEPS = 3, 64  # whose medians count: single ones can be slow for other reasons


class AuditCost:
    """Cost of an audit on this rank, in steps, from the durations of audited and other steps."""

    def __init__(self) -> None:
        self._others: deque[float] = deque(maxlen=_NUM_STEPS)  # seconds
        self._audited: deque[float] = deque(maxlen=_NUM_AUDITS)  # seconds more than other steps take
        self._is_after_audit = False

    def add_step(self, seconds: float, *, is_audited: bool) -> float | None:
        """Count a step. After the one that follows an audited step, return the median cost of audits, in steps.

        That step counts towards the audit, which still compares the updated state in it. Returns None after others, and
        until there are enough audits and steps.
        """
        is_after_audit, self._is_after_audit = self._is_after_audit, is_audited
        if is_audited or is_after_audit:
            self._add_audited(seconds, is_first=not is_after_audit)
        else:
            self._others.append(seconds)
        is_known = len(self._audited) == _NUM_AUDITS and bool(self._others)
        return median(self._audited) / median(self._others) if is_after_audit and is_known else None

    def _add_audited(self, seconds: float, *, is_first: bool) -> None:
        if not self._others:
            return
        more = seconds - median(self._others)
        if is_first:
            self._audited.append(more)
        elif self._audited:
            self._audited[-1] += more


def adapt_interval(interval: int, cost: float, fewest_microbatches: int) -> int:
    """Return the steps between two audits such that they cost at most 1 % of the time of the steps.

    `interval`: so far; a cost that was measured too low at most halves it. `cost`: of an audit, in steps, on the rank
    where it is highest. `fewest_microbatches`: of a rank in a step, of which an audit computes one: it costs at least
    half of what that suggests.
    """
    least_cost = PASSES_COST / fewest_microbatches / 2
    return max(_MIN_INTERVAL, interval // 2, ceil(max(cost, least_cost) / MAX_AUTO_COST))
