"""Order of failures of several ranks, to tell the root cause from its consequences."""

from __future__ import annotations

from raytrain_hpc.driver.corruption_attribution import REPLICAS_DIFFER
from raytrain_hpc.elastic.audit_verdict import DISPUTED, FAULTY_DEVICE, SUSPECTED
from raytrain_hpc.elastic.death_report import CRASHED, OUT_OF_MEMORY
from raytrain_hpc.elastic.failure_budget import PREEMPTED
from raytrain_hpc.elastic.fault_attribution import is_peer_failure
from raytrain_hpc.errors import WorkerFailedError

CONSEQUENCE = 3
LINK_DOWN = "link down"  # of a node, if the run has several
AVOIDED_KINDS = (LINK_DOWN, FAULTY_DEVICE)  # of failures after which a node is not used any more
NODE_KINDS = ("node lost", PREEMPTED)  # of failures that concern a whole node
_PRIMARY_KINDS = (
    "died",
    CRASHED,
    OUT_OF_MEMORY,
    "node lost",
    PREEMPTED,
    LINK_DOWN,
    FAULTY_DEVICE,
    SUSPECTED,
    DISPUTED,
    "corrupt",
    "slow",
    "deadlocked",
    "frozen",
    "interpreter held",
    "stalled",
    "out of step",
)


def cascade_order(failure: WorkerFailedError) -> int:
    """Return 0 for a failure that is a cause, such as a dead process, up to CONSEQUENCE for the effect of another."""
    if failure.kind in _PRIMARY_KINDS:
        return 0
    if failure.kind == REPLICAS_DIFFER:
        return CONSEQUENCE
    if failure.kind != "raised":
        return 1
    return CONSEQUENCE if is_peer_failure(failure.reason) else 2
