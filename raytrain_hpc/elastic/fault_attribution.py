"""Which rank did not do what the others did? Flight records of all ranks -> the guilty ones. Pure decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_OF_A_PEER = ("GenerationFallen", "gloo", "Connection closed by peer", "NCCL", "ECONNRESET")


@dataclass(frozen=True)
class Call:
    """One collective that a rank entered: the `number`-th in its `group`. `pending`: it has not come out of it."""

    group: str
    number: int
    operation: str  # with the sizes of what goes in
    pending: bool

    def __str__(self) -> str:
        return f"{self.operation}, number {self.number} of group {self.group}"


@dataclass(frozen=True)
class Blame:
    """Who is to blame, and for what: the call that the others stand in. `kind`: out of step, or stalled."""

    kind: Literal["out of step", "stalled"]
    ranks: tuple[int, ...]
    operation: str


def blame(records: Mapping[int, Sequence[Call]]) -> Blame | None:
    """The ranks that differ from the rest; None where their records do not tell.

    First who called another operation than most at the same place (something was skipped, or in another order), then
    who is in none while others wait in one, then who has come the least far in the group where that is; and where as
    many stand here as there, who went on in a way in which nobody has ever gone on before.
    """
    return _differing(records) or _absent(records) or _behind(records) or _unusual(records)


def peer_gone(reason: str) -> bool:
    """Whether what a rank raised says that another one is gone, and nothing of itself."""
    return any(word in reason for word in _OF_A_PEER)


def pending(records: Mapping[int, Sequence[Call]]) -> str:
    """The first call that any of these ranks stands in, or stood in when it broke; nothing where there is none."""
    waiting = [call for calls in records.values() for call in calls if call.pending]
    waiting = waiting or [calls[-1] for calls in records.values() if calls]
    return str(min(waiting, key=lambda call: call.number)) if waiting else ""


def _differing(records: Mapping[int, Sequence[Call]]) -> Blame | None:
    places: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, calls in records.items():
        for call in calls:
            places.setdefault((call.group, call.number), {})[rank] = call
    places = {place: there for place, there in places.items() if any(call.pending for call in there.values())}
    for place in sorted(places, key=lambda place: place[1]):
        there = places[place]
        counted = Counter(call.operation for call in there.values())
        (most, count), *rest = counted.most_common()
        if rest and rest[0][1] < count:
            wrong = tuple(sorted(rank for rank, call in there.items() if call.operation != most))
            right = next(call for call in there.values() if call.operation == most)
            return Blame("out of step", wrong, f"{right}; called {there[wrong[0]].operation} instead")
    return None


def _absent(records: Mapping[int, Sequence[Call]]) -> Blame | None:
    waiting = {rank: call for rank, calls in records.items() for call in calls if call.pending}
    absent = tuple(sorted(rank for rank in records if rank not in waiting))
    if not waiting or not absent or len(absent) * 2 > len(records):
        return None
    first = min(waiting.values(), key=lambda call: call.number)
    return Blame("stalled", absent, f"{first}; did not arrive")


def _behind(records: Mapping[int, Sequence[Call]]) -> Blame | None:
    last: dict[str, dict[int, Call]] = {}
    for rank, calls in records.items():
        for call in calls:
            if call.pending:
                last.setdefault(call.group, {})[rank] = call
    for there in last.values():
        numbers = Counter(call.number for call in there.values())
        (most, count), *rest = numbers.most_common()
        if rest and rest[0][1] < count:
            wrong = tuple(sorted(rank for rank, call in there.items() if call.number != most))
            right = next(call for call in there.values() if call.number == most)
            return Blame("out of step", wrong, f"{right}; stands in number {there[wrong[0]].number}")
    return None


def _unusual(records: Mapping[int, Sequence[Call]]) -> Blame | None:
    """A step is like the one before: what follows on what in a group has been seen, but for what somebody left out."""
    last: dict[int, tuple[str, str, str]] = {}
    seen: set[tuple[str, str, str]] = set()
    for rank, calls in records.items():
        groups: dict[str, list[Call]] = {}
        for call in calls:
            groups.setdefault(call.group, []).append(call)
        for group, there in groups.items():
            there.sort(key=lambda call: call.number)
            pairs = [(group, a.operation, b.operation) for a, b in zip(there, there[1:], strict=False)]
            if there[-1].pending and pairs:
                last[rank] = pairs.pop()
            seen.update(pairs)
    wrong = tuple(sorted(rank for rank, pair in last.items() if pair not in seen))
    if not wrong or len(wrong) * 2 > len(records):
        return None
    right = next((rank for rank in sorted(last) if rank not in wrong), None)
    stands = pending({right: records[right]}) if right is not None else ""
    return Blame("out of step", wrong, f"{stands}; called {last[wrong[0]][2]} after {last[wrong[0]][1]}")
