"""Which rank did not do what the others did? Flight records of all ranks -> the guilty ones. Pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_PEER_FAILURE_PATTERNS = ("GenerationAbortedError", "gloo", "Connection closed by peer", "NCCL", "ECONNRESET")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective that a rank entered: the `number`-th in its `group`. `pending`: it has not come out of it."""

    group: str
    sequence_number: int
    operation: str  # with the sizes of what goes in
    is_pending: bool

    def __str__(self) -> str:
        return f"{self.operation}, number {self.sequence_number} of group {self.group}"


@dataclass(frozen=True)
class FaultAttribution:
    """Who is to blame, and for what: the call that the others stand in. `kind`: out of step, or stalled."""

    kind: Literal["out of step", "stalled"]
    ranks: tuple[int, ...]
    operation: str


def attribute_fault(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    """The ranks that differ from the rest; None where their records do not tell.

    First who called another operation than most at the same place (something was skipped, or in another order), then
    who is in none while others wait in one, then who has come the least far in the group where that is; and where as
    many stand here as there, who went on in a way in which nobody has ever gone on before.
    """
    return (
        _find_mismatched_operation(calls_by_rank)
        or _find_absent_ranks(calls_by_rank)
        or _find_sequence_mismatch(calls_by_rank)
        or _find_unusual_order(calls_by_rank)
    )


def is_peer_failure(reason: str) -> bool:
    """Whether what a rank raised says that another one is gone, and nothing of itself."""
    return any(word in reason for word in _PEER_FAILURE_PATTERNS)


def describe_pending_call(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> str:
    """The first call that any of these ranks stands in, or stood in when it broke; nothing where there is none."""
    waiting = [call for calls in calls_by_rank.values() for call in calls if call.is_pending]
    waiting = waiting or [calls[-1] for calls in calls_by_rank.values() if calls]
    return str(min(waiting, key=lambda call: call.sequence_number)) if waiting else ""


def _find_mismatched_operation(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    places: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
    for rank, calls in calls_by_rank.items():
        for call in calls:
            places.setdefault((call.group, call.sequence_number), {})[rank] = call
    places = {place: there for place, there in places.items() if any(call.is_pending for call in there.values())}
    for place in sorted(places, key=lambda place: place[1]):
        there = places[place]
        counted = Counter(call.operation for call in there.values())
        (most, count), *rest = counted.most_common()
        if rest and rest[0][1] < count:
            wrong = tuple(sorted(rank for rank, call in there.items() if call.operation != most))
            right = next(call for call in there.values() if call.operation == most)
            return FaultAttribution("out of step", wrong, f"{right}; called {there[wrong[0]].operation} instead")
    return None


def _find_absent_ranks(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    waiting = {rank: call for rank, calls in calls_by_rank.items() for call in calls if call.is_pending}
    absent = tuple(sorted(rank for rank in calls_by_rank if rank not in waiting))
    if not waiting or not absent or len(absent) * 2 > len(calls_by_rank):
        return None
    first = min(waiting.values(), key=lambda call: call.sequence_number)
    return FaultAttribution("stalled", absent, f"{first}; did not arrive")


def _find_sequence_mismatch(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    last: dict[str, dict[int, CollectiveCall]] = {}
    for rank, calls in calls_by_rank.items():
        for call in calls:
            if call.is_pending:
                last.setdefault(call.group, {})[rank] = call
    for there in last.values():
        numbers = Counter(call.sequence_number for call in there.values())
        (most, count), *rest = numbers.most_common()
        if rest and rest[0][1] < count:
            wrong = tuple(sorted(rank for rank, call in there.items() if call.sequence_number != most))
            right = next(call for call in there.values() if call.sequence_number == most)
            return FaultAttribution(
                "out of step", wrong, f"{right}; stands in number {there[wrong[0]].sequence_number}"
            )
    return None


def _find_unusual_order(calls_by_rank: Mapping[int, Sequence[CollectiveCall]]) -> FaultAttribution | None:
    """A step is like the one before: what follows on what in a group has been seen, but for what somebody left out."""
    last: dict[int, tuple[str, str, str]] = {}
    seen: set[tuple[str, str, str]] = set()
    for rank, calls in calls_by_rank.items():
        groups: dict[str, list[CollectiveCall]] = {}
        for call in calls:
            groups.setdefault(call.group, []).append(call)
        for group, there in groups.items():
            there.sort(key=lambda call: call.sequence_number)
            pairs = [(group, a.operation, b.operation) for a, b in zip(there, there[1:], strict=False)]
            if there[-1].is_pending and pairs:
                last[rank] = pairs.pop()
            seen.update(pairs)
    wrong = tuple(sorted(rank for rank, pair in last.items() if pair not in seen))
    if not wrong or len(wrong) * 2 > len(calls_by_rank):
        return None
    right = next((rank for rank in sorted(last) if rank not in wrong), None)
    stands = describe_pending_call({right: calls_by_rank[right]}) if right is not None else ""
    return FaultAttribution("out of step", wrong, f"{stands}; called {last[wrong[0]][2]} after {last[wrong[0]][1]}")
