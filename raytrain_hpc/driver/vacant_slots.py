"""Slots in which an actor is to be started again: soon, or later and later if it fails there again and again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from raytrain_hpc.driver.slot_reservations import Slot

_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 60.0  # between a failure and the next start; it doubles with each failure
_MAX_AWAITED_FAILURES = 5  # to start in a slot, one after the other; afterwards nothing waits for the slot


@dataclass(frozen=True)
class _VacantSlot:
    """A slot whose actor has ended on the node `node_id`, and that stays empty until `since` (monotonic seconds)."""

    since: float
    slot: Slot
    node_id: str


class VacantSlots:
    """Slots without an actor, with the failures in each: those of one slot say nothing about another.

    No slot is given up. Its node may only have been short of something for a while, such as files from a server.
    """

    def __init__(self) -> None:
        self._vacant: list[_VacantSlot] = []
        self._failed_starts: Counter[Slot] = Counter()  # in a row
        self._idle_deaths: Counter[Slot] = Counter()

    def add(self, slot: Slot, node_id: str) -> None:
        """Add the slot of an actor that has ended on a node."""
        self._vacant.append(_VacantSlot(time.monotonic(), slot, node_id))

    def add_after_failed_start(self, slot: Slot) -> None:
        """Add a slot in which an actor did not start."""
        self._failed_starts[slot] += 1
        self._add_later(slot, slot.node_id, self._failed_starts[slot])

    def add_after_idle_death(self, slot: Slot, node_id: str) -> None:
        """Add the slot of an actor that has ended while it was idle: no limit on failures of the run counts it."""
        self._idle_deaths[slot] += 1
        self._add_later(slot, node_id, self._idle_deaths[slot])

    def _add_later(self, slot: Slot, node_id: str, num_failures: int) -> None:
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 30))
        self._vacant.append(_VacantSlot(time.monotonic() + delay_s, slot, node_id))

    def record_start(self, slot: Slot) -> None:
        """Forget the failed starts in a slot, because an actor has started there."""
        del self._failed_starts[slot]

    def take_due(self, vacant_before: float, draining_nodes: Collection[str]) -> list[Slot]:
        """Remove and return the slots that are due since `vacant_before` (monotonic seconds), on no draining node."""
        due = [
            vacant for vacant in self._vacant if vacant.since <= vacant_before and vacant.node_id not in draining_nodes
        ]
        self._vacant = [vacant for vacant in self._vacant if vacant not in due]
        return [vacant.slot for vacant in due]

    def __bool__(self) -> bool:
        """Return whether any slot is vacant."""
        return bool(self._vacant)

    def is_start_likely(self, starting: Iterable[Slot]) -> bool:
        """Return whether it makes sense to wait for an actor: in a vacant slot, or one of `starting`."""
        slots = [*starting, *(vacant.slot for vacant in self._vacant)]
        return any(self._failed_starts[slot] <= _MAX_AWAITED_FAILURES for slot in slots)

    def release(self, groups: Collection[int]) -> None:
        """Forget the slots of placement groups, given by `id`, which the run releases."""
        self._vacant = [vacant for vacant in self._vacant if id(vacant.slot.group) not in groups]
        for counter in (self._failed_starts, self._idle_deaths):
            for slot in [slot for slot in counter if id(slot.group) in groups]:
                del counter[slot]
