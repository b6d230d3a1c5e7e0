"""The last committed states of ranks, in memory: what a run goes on from when a rank is lost.

Two steps of each, because at a fault ranks can stand one step apart: some have stepped, others were still waiting for
the last sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from raytrain_hpc.state.host_buffer import HostBuffer
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import ShardedState

_NO_STEP = -1


class SnapshotSlot:
    """Room for a state. `mark`: eight bytes that say which one is whole in it, as far as others are to see them."""

    def __init__(self, buffer: HostBuffer | None = None, step_word: memoryview | None = None) -> None:
        self.buffer = HostBuffer() if buffer is None else buffer
        self._step_word = memoryview(bytearray(8)).cast("q") if step_word is None else step_word
        self.step = None
        self.pending_step: int | None = None  # the step that is on its way into it
        self.state = ShardedState()

    @property
    def step(self) -> int | None:
        """None: nothing whole is in it."""
        return decode_step(self._step_word[0])

    @step.setter
    def step(self, step: int | None) -> None:
        self._step_word[0] = _NO_STEP if step is None else step


def decode_step(word: int) -> int | None:
    """What a mark says."""
    return None if word == _NO_STEP else word


class RankSnapshots(Protocol):
    """The states of one rank after the last two steps."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held whole, ascending."""

    def get_state(self, step: int) -> ShardedState:
        """The state of `step`; nothing where it is not held."""


class SnapshotRing:
    """Those that this process has room for. `slots`: where, unless in memory of its own."""

    def __init__(self, slots: tuple[SnapshotSlot, SnapshotSlot] | None = None) -> None:
        self._slots = (SnapshotSlot(), SnapshotSlot()) if slots is None else slots

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are held whole, ascending."""
        return tuple(sorted(slot.step for slot in self._slots if slot.step is not None))

    def get_state(self, step: int) -> ShardedState:
        """The state of `step`; nothing where it is not held."""
        return next((slot.state for slot in self._slots if slot.step == step), ShardedState())

    def evict_oldest(self) -> SnapshotSlot:
        """The slot of the older step, which is not held any more; whoever fills it says then which step it has."""
        slot = min(self._slots, key=lambda one: _NO_STEP if one.step is None else one.step)
        slot.step = slot.pending_step = None  # while it is neither
        return slot

    def synchronize(self) -> None:
        """Wait for what is on its way; then it is held."""
        for slot in self._slots:
            if slot.pending_step is not None:
                slot.buffer.synchronize()
                slot.step, slot.pending_step = slot.pending_step, None


class SnapshotStore:
    """What a process holds of steps: its own states, and other ranks' states for them, as copies or opened.

    Outlives the groups and the model of a generation; a new generation goes on from it. `generation`: in which it was
    taken, whose ranks the copies go by.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._own_snapshots = SnapshotRing()
        self._replicas: dict[int, SnapshotRing] = {}
        self._attached: Mapping[int, RankSnapshots] = {}
        self._live: tuple[int, ShardedState] | None = None
        self._verified = SnapshotSlot()

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of which the own state is held whole, ascending."""
        agreed = () if self._verified.step is None else (self._verified.step,)
        return tuple(sorted({*self._own_snapshots.steps, *agreed}))

    @property
    def replica_steps(self) -> dict[int, tuple[int, ...]]:
        """The steps that are held whole of other ranks, by their rank in the generation that took them."""
        return {rank: kept.steps for rank, kept in (*self._replicas.items(), *self._attached.items())}

    def take(self, step: int, state: ShardedState) -> SnapshotSlot:
        """Keep the state after `step` committed steps instead of the older one.

        From a GPU it comes behind the next step: before the state changes, `arrive` must have been called.
        """
        slot = self._own_snapshots.evict_oldest()
        slot.state = slot.buffer.copy(state)
        slot.pending_step = step
        if slot.buffer.is_synchronized:
            self.synchronize()
        return slot

    def synchronize(self) -> None:
        """Wait for copies of the own state that are on their way; then they are held."""
        self._own_snapshots.synchronize()

    def reserve_replica(self, rank: int, index: StateIndex) -> SnapshotSlot:
        """Room for a state of another rank, instead of the older one of it."""
        slot = self._replicas.setdefault(rank, SnapshotRing()).evict_oldest()
        slot.state = slot.buffer.reserve(index)
        return slot

    def publish_live(self, step: int, state: ShardedState) -> None:
        """The live state is that of `step`, and stays as it is until it is withdrawn: no copy is needed."""
        self._live = step, state

    def revoke_live(self) -> None:
        """The live state is about to change, or to go."""
        self._live = None

    def copy_live(self) -> None:
        """Copy what is lent, whose memory is about to go."""
        self.synchronize()
        if self._live is not None and self._live[0] not in self.steps:
            self.take(*self._live)
            self.synchronize()
        self._live = None

    def keep_verified(self, step: int, state: ShardedState) -> None:
        """Keep the state of `step` until another one is agreed on: all replicas of it are equal."""
        self._verified.step = None
        self._verified.state = self._verified.buffer.copy(state)
        self._verified.buffer.synchronize()
        self._verified.step = step

    def discard_unverified(self) -> None:
        """Replicas differ: of all that is held, only what was agreed on is to be gone on from."""
        self._own_snapshots, self._replicas, self._attached, self._live = SnapshotRing(), {}, {}, None

    def get_state(self, step: int) -> ShardedState:
        """All that is held of `step`, of this rank and of others."""
        agreed = self._verified.state if self._verified.step == step else ShardedState()
        others = [kept.get_state(step) for kept in (*self._replicas.values(), *self._attached.values())]
        return ShardedState(
            held for holding in (self._own_snapshots.get_state(step) or agreed, *others) for held in holding
        )

    def reset(
        self, generation: int, own: SnapshotRing | None = None, attached: Mapping[int, RankSnapshots] | None = None
    ) -> None:
        """Forget everything and free the memory: what this generation holds is cut otherwise.

        `own`: where its own states go, unless in memory of its own. `opened`: by rank, what others keep and this
        process sees.
        """
        self.generation = generation
        self.discard_unverified()
        self._own_snapshots, self._attached = own or SnapshotRing(), attached or {}
        self._verified = SnapshotSlot()
