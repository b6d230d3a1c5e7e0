"""Failure policy: how many failures in a row a run survives, with preemptions counted apart. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_hpc.config.schema import AUTO, Config

PREEMPTED = "preempted"  # kind of a failure on a node whose removal was announced


@dataclass(frozen=True)
class FailureCount:
    """Failures and preemptions in a row, counted from the last one by which the furthest step had advanced."""

    failures: int = 0
    preemptions: int = 0
    furthest_step: int = -1  # furthest committed step at any failure


def count_failure(count: FailureCount, kind: str, step: int) -> FailureCount:
    """Return the count after a failure of this kind, when `step` steps are committed."""
    is_preemption = kind == PREEMPTED
    has_advanced = step > count.furthest_step
    return FailureCount(
        (0 if has_advanced else count.failures) + (not is_preemption),
        (0 if has_advanced else count.preemptions) + is_preemption,
        max(step, count.furthest_step),
    )


def find_exceeded_limit(config: Config, count: FailureCount) -> str | None:
    """Return which limit the count exceeds, as "N failures (fault.max_failures=M)", or None."""
    if count.failures > config.fault.max_failures:
        return f"{count.failures} failures (fault.max_failures={config.fault.max_failures})"
    limit = config.fault.max_preemptions
    if limit != AUTO and count.preemptions > int(limit):
        return f"{count.preemptions} preemptions (fault.max_preemptions={limit})"
    return None
