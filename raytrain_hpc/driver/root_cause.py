"""Of the failures of several ranks, which one began it?"""

from __future__ import annotations

from raytrain_hpc.elastic.fault_attribution import peer_gone
from raytrain_hpc.errors import WorkerFailed

PEER_GONE = 3
_GIVEN_UP = (
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


def innocence(failure: WorkerFailed) -> int:
    """0: a dead process, or one given up on; up to PEER_GONE: what follows from the end of another one."""
    if failure.kind in _GIVEN_UP:
        return 0
    if failure.kind == "replicas differ":
        return PEER_GONE
    if failure.kind != "raised":
        return 1
    return PEER_GONE if peer_gone(failure.reason) else 2
