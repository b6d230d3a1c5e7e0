"""In-memory snapshots of the last committed steps, from which a run recovers when a rank is lost.

Two steps are kept per rank, because ranks can be one step apart when a fault occurs: some have applied the update,
others were still waiting in the last all-reduce. With `fault.keep_verified_state`, the last verified step is kept too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from raytrain_hpc.snapshot.shared_file import decode_step, encode_step
from raytrain_hpc.state.host_buffer import HostBuffer
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import ShardedState

NUM_SLOTS = 3  # of a rank: for the last two steps, and a verified one


class SnapshotSlot:
    """Memory for the snapshot of one step.

    `step_word`: eight bytes with the step of the complete snapshot in this slot. In shared memory, other processes read
    the step there. `pending_step`: the step that is being copied into the slot.
    """

    def __init__(self, buffer: HostBuffer | None = None, step_word: memoryview | None = None) -> None:
        self.buffer = HostBuffer() if buffer is None else buffer
        self._step_word = memoryview(bytearray(8)).cast("q") if step_word is None else step_word
        self.step = None
        self.pending_step: int | None = None
        self.state = ShardedState()

    def invalidate(self) -> None:
        """Mark the snapshot as incomplete, for good: other processes do not see later ones, such as one in transfer."""
        shared_word, self._step_word = self._step_word, memoryview(bytearray(8)).cast("q")
        self.step = self.pending_step = None
        shared_word[0] = encode_step(None)

    @property
    def step(self) -> int | None:
        """The step of the complete snapshot; None if there is none."""
        return decode_step(self._step_word[0])

    @step.setter
    def step(self, step: int | None) -> None:
        self._step_word[0] = encode_step(step)


class RankSnapshots(Protocol):
    """Read access to the snapshots of one rank after its last two steps."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with a complete snapshot, ascending."""

    def get_state(self, step: int) -> ShardedState:
        """Return the state after `step`; empty if there is no complete snapshot of it."""


class SnapshotRing:
    """The slots for the last two snapshots of one rank, and for one that is kept longer.

    `slots`: three existing ones; default: ordinary host memory, which is allocated when it is used.
    """

    def __init__(self, slots: Sequence[SnapshotSlot] = ()) -> None:
        self._slots = tuple(slots) or tuple(SnapshotSlot() for _ in range(NUM_SLOTS))
        self._kept_step: int | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with a complete snapshot, ascending."""
        return tuple(sorted(slot.step for slot in self._slots if slot.step is not None))

    def get_state(self, step: int) -> ShardedState:
        """Return the state after `step`; empty if there is no complete snapshot of it."""
        return next((slot.state for slot in self._slots if slot.step == step), ShardedState())

    def evict_oldest(self) -> SnapshotSlot:
        """Invalidate the older snapshot and return its slot. The caller fills the slot, then sets its step."""
        slots = [slot for slot in self._slots if self._kept_step is None or slot.step != self._kept_step]
        slot = min(slots[: NUM_SLOTS - 1], key=lambda slot: encode_step(slot.step))
        slot.step = slot.pending_step = None  # invalid while it is being overwritten
        return slot

    def keep(self, step: int | None) -> None:
        """Keep the snapshot of `step`, once it is complete, beside the last two, instead of the one kept before."""
        self._kept_step = step

    def invalidate(self) -> None:
        """Mark all snapshots but the one that is kept as incomplete, also for other processes that have them open.

        Take none afterwards.
        """
        for slot in self._slots:
            if slot.step is None or slot.step != self._kept_step:
                slot.invalidate()

    def has_step(self, step: int) -> bool:
        """Return whether there is a snapshot of `step`, or one in progress."""
        return any(step in (slot.step, slot.pending_step) for slot in self._slots)

    def synchronize(self) -> None:
        """Wait for the copies in progress and mark their snapshots as complete."""
        for slot in self._slots:
            if slot.pending_step is not None:
                slot.buffer.synchronize()
                slot.step, slot.pending_step = slot.pending_step, None


class _OneSnapshot:
    """Read access to one of the snapshots of a rank. Implements `RankSnapshots`. `step` None: none."""

    def __init__(self, snapshots: RankSnapshots, step: int | None):
        self._snapshots, self._step = snapshots, step

    @property
    def steps(self) -> tuple[int, ...]:
        """The step, if its snapshot is complete."""
        return tuple(step for step in self._snapshots.steps if step == self._step)

    def get_state(self, step: int) -> ShardedState:
        """Return the state after `step`; empty for any other step."""
        return self._snapshots.get_state(step) if step == self._step else ShardedState()


class SnapshotStore:
    """All snapshots in this process: those of its own rank and the replicas of other ranks' snapshots.

    A replica is a copy that was received (`reserve_replica`) or shared memory of another process (`reset`). The store
    outlives the process groups and the model of a generation; the next generation recovers from it. `generation`: the
    generation whose ranks took the snapshots and number the replicas.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._own_snapshots = SnapshotRing()
        self._replicas: dict[int, SnapshotRing] = {}
        self._attached: Mapping[int, RankSnapshots] = {}
        self._live: tuple[int, ShardedState] | None = None
        self._verified = SnapshotSlot()  # of state that is in no ring
        self._kept_step: int | None = None  # of the verified snapshots in the rings

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with a complete snapshot of this rank, ascending, the verified one included."""
        verified_steps = () if self._verified.step is None else (self._verified.step,)
        return tuple(sorted({*self._own_snapshots.steps, *verified_steps}))

    @property
    def verified_step(self) -> int | None:
        """The step that is kept as verified, None if there is none."""
        return self._kept_step if self._verified.step is None else self._verified.step

    @property
    def replica_steps(self) -> dict[int, tuple[int, ...]]:
        """The steps with a complete replica, by rank in the generation that took them."""
        return {rank: snapshots.steps for rank, snapshots in (*self._replicas.items(), *self._attached.items())}

    def take(self, step: int, state: ShardedState) -> SnapshotSlot:
        """Take a snapshot of the state after `step` committed steps. It replaces the older of the two snapshots.

        Returns the slot, for replication. Copies from a GPU are asynchronous: call `synchronize` before the state
        changes.
        """
        slot = self._own_snapshots.evict_oldest()
        slot.state = slot.buffer.copy(state)
        slot.pending_step = step
        if slot.buffer.is_synchronized:
            self.synchronize()
        return slot

    def synchronize(self) -> None:
        """Wait for this rank's snapshots in progress; afterwards they are complete."""
        self._own_snapshots.synchronize()

    def reserve_replica(self, rank: int, index: StateIndex) -> SnapshotSlot:
        """Return a slot for a replica of another rank's snapshot, in place of the older one.

        The caller receives the data into the slot's buffer and then sets its step. `index` is that of the rank's state.
        """
        if rank not in self._replicas:
            self._replicas[rank] = SnapshotRing()
            self._replicas[rank].keep(self._kept_step)
        slot = self._replicas[rank].evict_oldest()
        slot.state = slot.buffer.reserve(index)
        return slot

    def publish_live(self, step: int, state: ShardedState) -> None:
        """Register the live state as that after `step`, so that recovery needs no snapshot of it.

        Call after a committed step. The state must not change before `revoke_live`.
        """
        self._live = step, state

    @property
    def is_live_published(self) -> bool:
        """Whether a live state is registered."""
        return self._live is not None

    def revoke_live(self) -> None:
        """Unregister the live state. Call before it changes, or if it is lost."""
        self._live = None

    def copy_live(self) -> None:
        """Take a snapshot of the live state, if one is registered, and unregister it.

        Call when a generation ends, before the memory of the model is released.
        """
        self.synchronize()
        if self._live is not None and self._live[0] not in self.steps:
            self.take(*self._live)
            self.synchronize()
        self._live = None

    def has_snapshot(self, step: int) -> bool:
        """Return whether there is a snapshot of this rank's state after `step`, or one in progress."""
        return self._own_snapshots.has_step(step)

    def keep_verified_snapshots(self, step: int) -> None:
        """Keep the snapshots after `step` of all ranks until the next call. Call on all ranks once it is verified.

        Other processes of the node that have the memory open keep them too.
        """
        self._kept_step = step
        for snapshots in (self._own_snapshots, *self._replicas.values()):
            snapshots.keep(step)

    def keep_verified(self, step: int, state: ShardedState) -> None:
        """Copy the state after `step` and keep it until the next call. Call once it is verified.

        For state of which there are no snapshots.
        """
        self._verified.step = None
        self._verified.state = self._verified.buffer.copy(state)
        self._verified.buffer.synchronize()
        self._verified.step = step

    def discard_unverified(self) -> None:
        """Discard all snapshots and replicas but verified ones. Call after silent corruption.

        Other processes of the node that have the memory of this one open see them as incomplete too.
        """
        self.synchronize()
        for snapshots in (self._own_snapshots, *self._replicas.values()):
            snapshots.invalidate()
        if self._kept_step is None:
            self._clear()
        self._attached = {rank: _OneSnapshot(of_rank, self._kept_step) for rank, of_rank in self._attached.items()}
        self._live = None

    def _clear(self) -> None:
        self._own_snapshots, self._replicas, self._attached, self._live = SnapshotRing(), {}, {}, None
        self._kept_step = None

    def get_state(self, step: int) -> ShardedState:
        """Return all shards in memory of the state after `step`: this rank's snapshot and the replicas."""
        verified = self._verified.state if self._verified.step == step else ShardedState()
        replicas = [snapshots.get_state(step) for snapshots in (*self._replicas.values(), *self._attached.values())]
        return ShardedState(
            shard for state in (self._own_snapshots.get_state(step) or verified, *replicas) for shard in state
        )

    def reset(
        self,
        generation: int,
        own_snapshots: SnapshotRing | None = None,
        attached_snapshots: Mapping[int, RankSnapshots] | None = None,
        replicas: Mapping[int, SnapshotRing] | None = None,
    ) -> None:
        """Discard everything, release the memory, and start a generation, whose state is sharded differently.

        Call after the new generation has loaded its state. `own_snapshots`: slots for this rank's snapshots, such as
        shared memory; default: ordinary host memory. `attached_snapshots`: by rank, other processes' snapshots in
        shared memory. `replicas`: by rank, slots for the snapshots that this rank receives; default: host memory.
        """
        self.generation = generation
        self._clear()
        self._own_snapshots, self._attached = own_snapshots or SnapshotRing(), attached_snapshots or {}
        self._replicas = dict(replicas or {})
        self._verified = SnapshotSlot()
