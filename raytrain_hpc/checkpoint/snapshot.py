"""The last two committed states of a rank, in memory: what a run goes on from when a rank is lost.

Two, because at a fault ranks can stand one step apart: some have stepped, others were still waiting for the last sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raytrain_hpc.state.aside import Aside
from raytrain_hpc.state.holding import Holding


@dataclass
class _Slot:
    aside: Aside = field(default_factory=Aside)
    step: int | None = None  # None: nothing whole is in it
    holding: Holding = field(default_factory=Holding)


class Snapshots:
    """Outlives the groups and the model of a generation; a new generation goes on from it."""

    def __init__(self) -> None:
        self._slots = (_Slot(), _Slot())

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held whole, ascending."""
        return tuple(sorted(slot.step for slot in self._slots if slot.step is not None))

    def take(self, step: int, holding: Holding) -> None:
        """Keep the state of `step` committed steps instead of the older one."""
        slot = min(self._slots, key=lambda one: -1 if one.step is None else one.step)
        slot.step = None  # while it is neither
        slot.holding = slot.aside.copy(holding)
        slot.step = step

    def at(self, step: int) -> Holding:
        """The state of `step`; an empty one where it is not held."""
        return next((slot.holding for slot in self._slots if slot.step == step), Holding())

    def drop(self) -> None:
        """Forget everything and free the memory: what the next generation holds is cut otherwise."""
        self._slots = (_Slot(), _Slot())
