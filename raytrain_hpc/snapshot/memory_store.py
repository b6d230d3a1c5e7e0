"""The last committed states of ranks, in memory: what a run goes on from when a rank is lost.

Two steps of each, because at a fault ranks can stand one step apart: some have stepped, others were still waiting for
the last sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from raytrain_hpc.state.host_buffer import Aside
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import Holding

_NONE = -1


class Slot:
    """Room for a state. `mark`: eight bytes that say which one is whole in it, as far as others are to see them."""

    def __init__(self, aside: Aside | None = None, mark: memoryview | None = None) -> None:
        self.aside = Aside() if aside is None else aside
        self._mark = memoryview(bytearray(8)).cast("q") if mark is None else mark
        self.step = None
        self.coming: int | None = None  # the step that is on its way into it
        self.holding = Holding()

    @property
    def step(self) -> int | None:
        """None: nothing whole is in it."""
        return step_of(self._mark[0])

    @step.setter
    def step(self, step: int | None) -> None:
        self._mark[0] = _NONE if step is None else step


def step_of(mark: int) -> int | None:
    """What a mark says."""
    return None if mark == _NONE else mark


class Kept(Protocol):
    """The states of one rank after the last two steps."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held whole, ascending."""

    def at(self, step: int) -> Holding:
        """The state of `step`; nothing where it is not held."""


class LastSteps:
    """Those that this process has room for. `slots`: where, unless in memory of its own."""

    def __init__(self, slots: tuple[Slot, Slot] | None = None) -> None:
        self._slots = (Slot(), Slot()) if slots is None else slots

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held whole, ascending."""
        return tuple(sorted(slot.step for slot in self._slots if slot.step is not None))

    def at(self, step: int) -> Holding:
        """The state of `step`; nothing where it is not held."""
        return next((slot.holding for slot in self._slots if slot.step == step), Holding())

    def vacate(self) -> Slot:
        """The slot of the older step, which is not held any more; whoever fills it says then which step it has."""
        slot = min(self._slots, key=lambda one: _NONE if one.step is None else one.step)
        slot.step = slot.coming = None  # while it is neither
        return slot

    def arrive(self) -> None:
        """Wait for what is on its way; then it is held."""
        for slot in self._slots:
            if slot.coming is not None:
                slot.aside.arrive()
                slot.step, slot.coming = slot.coming, None


class Snapshots:
    """What a process holds of steps: its own states, and other ranks' states for them, as copies or opened.

    Outlives the groups and the model of a generation; a new generation goes on from it. `generation`: in which it was
    taken, whose ranks the copies go by.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._own = LastSteps()
        self._copies: dict[int, LastSteps] = {}
        self._opened: Mapping[int, Kept] = {}
        self._lent: tuple[int, Holding] | None = None
        self._agreed = Slot()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of which the own state is held whole, ascending."""
        agreed = () if self._agreed.step is None else (self._agreed.step,)
        return tuple(sorted({*self._own.steps, *agreed}))

    @property
    def copies(self) -> dict[int, tuple[int, ...]]:
        """The steps that are held whole of other ranks, by their rank in the generation that took them."""
        return {rank: kept.steps for rank, kept in (*self._copies.items(), *self._opened.items())}

    def take(self, step: int, holding: Holding) -> Slot:
        """Keep the state after `step` committed steps instead of the older one.

        From a GPU it comes behind the next step: before the state changes, `arrive` must have been called.
        """
        slot = self._own.vacate()
        slot.holding = slot.aside.copy(holding)
        slot.coming = step
        if slot.aside.arrived:
            self.arrive()
        return slot

    def arrive(self) -> None:
        """Wait for copies of the own state that are on their way; then they are held."""
        self._own.arrive()

    def room_for(self, rank: int, index: StateIndex) -> Slot:
        """Room for a state of another rank, instead of the older one of it."""
        slot = self._copies.setdefault(rank, LastSteps()).vacate()
        slot.holding = slot.aside.room(index)
        return slot

    def lend(self, step: int, holding: Holding) -> None:
        """The live state is that of `step`, and stays as it is until it is withdrawn: no copy is needed."""
        self._lent = step, holding

    def withdraw(self) -> None:
        """The live state is about to change, or to go."""
        self._lent = None

    def keep_lent(self) -> None:
        """Copy what is lent, whose memory is about to go."""
        self.arrive()
        if self._lent is not None and self._lent[0] not in self.steps:
            self.take(*self._lent)
            self.arrive()
        self._lent = None

    def agree(self, step: int, holding: Holding) -> None:
        """Keep the state of `step` until another one is agreed on: all replicas of it are equal."""
        self._agreed.step = None
        self._agreed.holding = self._agreed.aside.copy(holding)
        self._agreed.aside.arrive()
        self._agreed.step = step

    def distrust(self) -> None:
        """Replicas differ: of all that is held, only what was agreed on is to be gone on from."""
        self._own, self._copies, self._opened, self._lent = LastSteps(), {}, {}, None

    def at(self, step: int) -> Holding:
        """All that is held of `step`, of this rank and of others."""
        agreed = self._agreed.holding if self._agreed.step == step else Holding()
        others = [kept.at(step) for kept in (*self._copies.values(), *self._opened.values())]
        return Holding(held for holding in (self._own.at(step) or agreed, *others) for held in holding)

    def begin(self, generation: int, own: LastSteps | None = None, opened: Mapping[int, Kept] | None = None) -> None:
        """Forget everything and free the memory: what this generation holds is cut otherwise.

        `own`: where its own states go, unless in memory of its own. `opened`: by rank, what others keep and this
        process sees.
        """
        self.generation = generation
        self.distrust()
        self._own, self._opened = own or LastSteps(), opened or {}
        self._agreed = Slot()
