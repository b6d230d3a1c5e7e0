"""Explanation of the failures of a generation: what the kernel, the last collectives and spares know of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from raytrain_hpc.driver.corruption_attribution import REPLICAS_DIFFER
from raytrain_hpc.driver.health_monitor import HealthMonitor
from raytrain_hpc.driver.root_cause import CONSEQUENCE, cascade_order
from raytrain_hpc.driver.spare_audits import SpareAudits
from raytrain_hpc.driver.stall_attribution import attribute_stall
from raytrain_hpc.driver.worker_group import Worker
from raytrain_hpc.elastic.fault_attribution import CollectiveCall, attribute_fault
from raytrain_hpc.elastic.watchdog import Suspect
from raytrain_hpc.errors import WorkerFailedError
from raytrain_hpc.runtime.control_channel import GenerationOutcome

Failures = dict[int, WorkerFailedError]  # by rank
BuildFailure = Callable[[int, str, str], WorkerFailedError]  # (rank, kind, reason)


def explain_deaths(failures: Failures, health: HealthMonitor, build: BuildFailure) -> None:
    """Tell crashes and the work of the kernel's out-of-memory killer from other deaths, in place."""
    dead_ranks = {rank for rank, failure in failures.items() if failure.kind == "died"}
    reports = health.explain_deaths() if dead_ranks else {}
    for rank in dead_ranks & reports.keys():
        failures[rank] = build(rank, reports[rank].kind, reports[rank].reason)
        failures[rank].stacks = reports[rank].stacks


def explain_stall(
    suspects: Sequence[Suspect], workers: Sequence[Worker], health: HealthMonitor, build: BuildFailure
) -> list[WorkerFailedError]:
    """Return failures of the ranks that hold up the other ranks, or none if that cannot be decided yet."""
    detected, by_rank = time.time(), {suspect.rank: suspect for suspect in suspects}
    found = attribute_stall(suspects, workers, health.local_node)
    if found is None:
        return []
    stacks, failures = health.collect_stacks(), []
    for rank, kind in sorted(found.kinds.items()):
        silent_s = by_rank[rank].silent_s if rank in by_rank else 0.0
        failure = build(rank, kind, found.reason or f"no sign of life for {silent_s:.1f} s")
        failure.last_seen, failure.operation, failure.stacks = detected - silent_s, found.operation, stacks
        failures.append(failure)
    return failures


def add_traceback(failure: WorkerFailedError, outcome: GenerationOutcome) -> WorkerFailedError:
    """Add to a failure what its rank reported of the exception that it raised, and return it."""
    failure.traceback, failure.is_program_error = outcome.traceback, outcome.is_program_error
    return failure


def is_error_of_all_ranks(failures: Failures, world_size: int) -> bool:
    """Return whether every rank raised an exception of the user's code."""
    return len(failures) == world_size and all(failure.is_program_error for failure in failures.values())


def attribute_out_of_step(
    failures: Failures, broken_calls: Mapping[int, Sequence[CollectiveCall]], build: BuildFailure
) -> None:
    """Attribute failures that are broken collectives only to the ranks that called a different one, in place."""
    cascade = all(error.kind == "raised" and cascade_order(error) == CONSEQUENCE for error in failures.values())
    if cascade and (fault := attribute_fault(broken_calls)):
        for rank in fault.ranks:
            failures[rank] = build(rank, fault.kind, failures[rank].reason)
            failures[rank].operation = fault.operation


def attribute_disagreement(
    failures: Failures, spare_audits: SpareAudits, workers: Sequence[Worker], build: BuildFailure
) -> None:
    """Attribute the end of a generation in which a spare disagreed with a rank to that rank, if none has failed.

    In any case, state from after the step that they disagree about is forgotten, although ranks may have audited it.
    """
    found = spare_audits.explain_end({failure.kind for failure in failures.values()})
    if found is None:
        return
    if {failure.kind for failure in failures.values()} <= {REPLICAS_DIFFER}:
        failures[found.rank] = build(found.rank, found.kind, found.reason)
    for failure in failures.values():
        failure.trusted_step = found.trusted_step
    for worker in workers:
        worker.states = tuple(part for part in worker.states if part.step <= found.trusted_step)
