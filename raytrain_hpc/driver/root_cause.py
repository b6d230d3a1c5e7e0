"""Of the failures of several ranks, which one began it?"""

from __future__ import annotations

from raytrain_hpc.elastic.fault_attribution import is_peer_failure
from raytrain_hpc.errors import WorkerFailedError

CONSEQUENCE = 3
_PRIMARY_KINDS = (
    "died",
    "node lost",
    "corrupt",
    "slow",
    "deadlocked",
    "frozen",
    "interpreter held",
    "stalled",
    "out of step",
)


def cascade_order(failure: WorkerFailedError) -> int:
    """0: a dead process, or one given up on; up to PEER_GONE: what follows from the end of another one."""
    if failure.kind in _PRIMARY_KINDS:
        return 0
    if failure.kind == "replicas differ":
        return CONSEQUENCE
    if failure.kind != "raised":
        return 1
    return CONSEQUENCE if is_peer_failure(failure.reason) else 2
