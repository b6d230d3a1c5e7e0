"""Failure policy: how many failures in a row a run survives, with preemptions counted apart. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import WorkerFailedError

PREEMPTED = "preempted"  # kind of a failure on a node whose removal was announced
_REMEDY = "another attempt would raise it again: correct the code, then repeat the command"
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")  # of an object, in a message: differs between processes


@dataclass(frozen=True)
class ProgramError:
    """An exception of the user's code, or of the passes of the model, that ended a generation.

    `reason`: its type, message and place. `on_all_ranks`: all ranks raised one. `step`: the steps that were committed.
    `has_trained`: this start of the run has committed a step.
    """

    reason: str
    on_all_ranks: bool
    step: int
    has_trained: bool


@dataclass(frozen=True)
class FailureCount:
    """Failures and preemptions in a row, counted from the last one by which the furthest step had advanced."""

    failures: int = 0
    preemptions: int = 0
    furthest_step: int = -1  # furthest committed step at any failure
    last_error: ProgramError | None = None  # that was the last failure
    lasting_error: str = ""  # why the last failure would be repeated by another attempt; "": it may not be


def count_failure(count: FailureCount, kind: str, step: int, error: ProgramError | None = None) -> FailureCount:
    """Return the count after a failure of this kind, when `step` steps are committed.

    `error`: the exception that was the failure, if it was one of the user's code.
    """
    is_preemption = kind == PREEMPTED
    has_advanced = step > count.furthest_step
    return FailureCount(
        (0 if has_advanced else count.failures) + (not is_preemption),
        (0 if has_advanced else count.preemptions) + is_preemption,
        max(step, count.furthest_step),
        error,
        "" if error is None else explain_lasting_error(count.last_error, error),
    )


def count_worker_failure(
    count: FailureCount, failure: WorkerFailedError, step: int, *, has_trained: bool
) -> FailureCount:
    """Return the count after a failure when `step` steps are committed. `has_trained`: one of them by this start."""
    error = ProgramError(failure.reason, failure.is_on_all_ranks, step, has_trained)
    return count_failure(count, failure.kind, step, error if failure.is_program_error else None)


def explain_lasting_error(previous: ProgramError | None, error: ProgramError) -> str:
    """Return why another attempt would raise this exception again, or "" if it may not.

    It would if the attempt before raised the same exception in the same step, and if all ranks raised an exception
    before any step was trained. `previous`: the one that was the failure before, if it was one.
    """
    if error.on_all_ranks and not error.has_trained:
        return f"an exception on all ranks before the first step ({_REMEDY})"
    if previous is not None and previous.step == error.step and _normalize(previous) == _normalize(error):
        return f"the same exception twice in step {error.step + 1} ({_REMEDY})"
    return ""


def _normalize(error: ProgramError) -> str:
    return _ADDRESS.sub("0x", error.reason)


def find_exceeded_limit(config: Config, count: FailureCount) -> str | None:
    """Return which limit the count exceeds, as "N failures (fault.max_failures=M)", or None.

    An exception that another attempt would raise again exceeds every limit.
    """
    if count.lasting_error:
        return count.lasting_error
    if count.failures > config.fault.max_failures:
        return f"{count.failures} failures (fault.max_failures={config.fault.max_failures})"
    limit = config.fault.max_preemptions
    if limit != AUTO and count.preemptions > int(limit):
        return f"{count.preemptions} preemptions (fault.max_preemptions={limit})"
    return None
