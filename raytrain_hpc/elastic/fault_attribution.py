"""Fault attribution: find the ranks that caused a hang from the collectives that each rank recorded. Pure functions.

PyTorch's Flight Recorder keeps the last collectives of each rank (distributed/flight_recorder.py). The driver collects
them when ranks are stalled, or when collectives broke although no rank exited (driver/ray_backend.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raytrain_hpc.device_backends import BACKENDS

# Texts in the exceptions that a rank raises because another rank failed.
_PEER_FAILURE_PATTERNS = (
    *("GenerationAbortedError", "Connection closed by peer", "ECONNRESET"),
    *(text for backend in BACKENDS.values() for text in backend.failure_texts),
)


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that a rank entered: call `sequence_number` of process group `group`."""

    group: str
    sequence_number: int
    operation: str  # name and input sizes
    is_pending: bool  # the rank has not returned from the call

    def __str__(self) -> str:
        return f"{self.operation}, number {self.sequence_number} of group {self.group}"


@dataclass(frozen=True)
class FaultAttribution:
    """The ranks that caused a hang.

    `kind`: "out of step", the ranks called another collective than the others; "stalled", the ranks are in no
    collective while the others wait in one. `operation`: the collective that the other ranks wait in, as text.
    """

    kind: Literal["out of step", "stalled"]
    ranks: tuple[int, ...]
    operation: str


def attribute_fault(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    """Return the ranks that caused a hang, or None if the records do not single out a minority of the ranks.

    Call when ranks make no progress, or when all collectives broke although no rank exited. `calls_by_rank` holds the
    recent calls of each rank, oldest first. Four rules are tried in this order; the first that finds ranks decides:

    1. Ranks whose operation differs from the majority's at the same sequence number of a group.
    2. Ranks that are in no collective while others wait in one.
    3. Ranks that wait at another sequence number of a group than the majority.
    4. Without a majority: ranks whose pending operation never followed their previous one before.
    """
    return (
        _find_mismatched_operation(calls_by_rank)
        or _find_absent_ranks(calls_by_rank)
        or _find_sequence_mismatch(calls_by_rank)
        or _find_unusual_order(calls_by_rank)
    )


def is_peer_failure(reason: str) -> bool:
    """Return whether an exception's text says that another rank failed, not the rank that raised it.

    Call for the exception that ended a rank, to tell the root cause of a failure from its consequences.
    """
    return any(pattern in reason for pattern in _PEER_FAILURE_PATTERNS)


def describe_pending_call(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> str:
    """Return the pending call with the lowest sequence number as text.

    If no call is pending, use the last call of each rank instead. Empty if no rank has recorded a call.
    """
    relevant_calls = [call for calls in calls_by_rank.values() for call in calls if call.is_pending]
    relevant_calls = relevant_calls or [calls[-1] for calls in calls_by_rank.values() if calls]
    return str(min(relevant_calls, key=lambda call: call.sequence_number)) if relevant_calls else ""


def _find_mismatched_operation(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    """Find ranks that called another operation than the majority at one sequence number of a group.

    Such a rank has skipped a collective or called two of them in another order. Only calls that at least one rank is
    still waiting in are compared, in the order of their sequence numbers.
    """
    calls_at: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
    for rank, calls in calls_by_rank.items():
        for call in calls:
            calls_at.setdefault((call.group, call.sequence_number), {})[rank] = call
    calls_at = {key: by_rank for key, by_rank in calls_at.items() if any(call.is_pending for call in by_rank.values())}
    for key in sorted(calls_at, key=lambda key: key[1]):
        by_rank = calls_at[key]
        operation_counts = Counter(call.operation for call in by_rank.values())
        (majority, count), *rest = operation_counts.most_common()
        if rest and rest[0][1] < count:
            wrong_ranks = tuple(sorted(rank for rank, call in by_rank.items() if call.operation != majority))
            expected = next(call for call in by_rank.values() if call.operation == majority)
            return FaultAttribution(
                "out of step", wrong_ranks, f"{expected}; called {by_rank[wrong_ranks[0]].operation} instead"
            )
    return None


def _find_absent_ranks(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    """Find ranks without a pending call while other ranks wait in one. They may be at most half of all ranks."""
    pending = {rank: call for rank, calls in calls_by_rank.items() for call in calls if call.is_pending}
    absent_ranks = tuple(sorted(rank for rank in calls_by_rank if rank not in pending))
    if not pending or not absent_ranks or len(absent_ranks) * 2 > len(calls_by_rank):
        return None
    first = min(pending.values(), key=lambda call: call.sequence_number)
    return FaultAttribution("stalled", absent_ranks, f"{first}; did not arrive")


def _find_sequence_mismatch(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    """Find ranks that wait at another sequence number of a group than the majority of the ranks waiting in it."""
    pending_by_group: dict[str, dict[int, CollectiveCall]] = {}
    for rank, calls in calls_by_rank.items():
        for call in calls:
            if call.is_pending:
                pending_by_group.setdefault(call.group, {})[rank] = call
    for pending in pending_by_group.values():
        number_counts = Counter(call.sequence_number for call in pending.values())
        (majority, count), *rest = number_counts.most_common()
        if rest and rest[0][1] < count:
            wrong_ranks = tuple(sorted(rank for rank, call in pending.items() if call.sequence_number != majority))
            expected = next(call for call in pending.values() if call.sequence_number == majority)
            return FaultAttribution(
                "out of step", wrong_ranks, f"{expected}; waits in number {pending[wrong_ranks[0]].sequence_number}"
            )
    return None


def _find_unusual_order(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    """Find ranks whose pending operation has never followed their previous one in that group, on any rank.

    Steps repeat the same collectives, so a new pair of successive operations shows that a rank left one out. The ranks
    may be at most half of all ranks. Works without a majority, for example with two ranks.
    """
    last_pairs: dict[int, tuple[str, str, str]] = {}
    known_pairs: set[tuple[str, str, str]] = set()
    for rank, calls in calls_by_rank.items():
        calls_by_group: dict[str, list[CollectiveCall]] = {}
        for call in calls:
            calls_by_group.setdefault(call.group, []).append(call)
        for group, group_calls in calls_by_group.items():
            group_calls.sort(key=lambda call: call.sequence_number)
            pairs = [(group, a.operation, b.operation) for a, b in zip(group_calls, group_calls[1:], strict=False)]
            if group_calls[-1].is_pending and pairs:
                last_pairs[rank] = pairs.pop()
            known_pairs.update(pairs)
    wrong_ranks = tuple(sorted(rank for rank, pair in last_pairs.items() if pair not in known_pairs))
    if not wrong_ranks or len(wrong_ranks) * 2 > len(calls_by_rank):
        return None
    correct_rank = next((rank for rank in sorted(last_pairs) if rank not in wrong_ranks), None)
    expected = describe_pending_call({correct_rank: calls_by_rank[correct_rank]}) if correct_rank is not None else ""
    return FaultAttribution(
        "out of step",
        wrong_ranks,
        f"{expected}; called {last_pairs[wrong_ranks[0]][2]} after {last_pairs[wrong_ranks[0]][1]}",
    )
