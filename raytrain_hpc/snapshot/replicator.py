"""Copies of snapshots in another rank's memory, sent behind the steps: what outlives the loss of a node."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch.distributed as dist

from raytrain_hpc.snapshot.memory_store import Slot, Snapshots
from raytrain_hpc.state.shard_index import StateIndex


class Copying:
    """Sends this rank's snapshots to its buddies, and keeps those of the ranks whose buddy it is.

    `pairs`: (rank, buddy). `indexes[r]`: what rank r holds. All ranks take snapshots of the same steps. `group`: of all
    ranks, between host memories, used by nobody else. A peer that is gone ends it without a word: the loop hears of
    that by itself, and a copy that is not whole is none.
    """

    def __init__(
        self,
        memory: Snapshots,
        rank: int,
        pairs: Sequence[tuple[int, int]],
        indexes: Sequence[StateIndex],
        group: dist.ProcessGroup,
    ):
        self._memory, self._group = memory, group
        self._buddies = [buddy for source, buddy in pairs if source == rank]
        self._sources = {source: indexes[source] for source, buddy in pairs if buddy == rank}
        self._jobs: SimpleQueue[tuple[int, Slot] | None] = SimpleQueue()
        self._under_way, self._changed, self._over = 0, threading.Condition(), False
        if self._buddies or self._sources:
            threading.Thread(target=self._run, name="copying", daemon=True).start()

    def send(self, step: int, slot: Slot) -> None:
        """Have the snapshot of a step copied; returns at once."""
        if self._buddies or self._sources:
            with self._changed:
                self._under_way += 1
            self._jobs.put((step, slot))

    def wait(self) -> None:
        """Wait until everything is copied, or will never be."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way <= 0)

    def finish(self) -> None:
        """The same, and no more will come."""
        self.wait()
        self.abandon()

    def abandon(self) -> None:
        """No more will come, and what is under way need not arrive."""
        self._over = True
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._over:
            try:
                self._exchange(*job)
            except RuntimeError:  # a peer is gone, or has left the generation
                break
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
        with self._changed:
            self._under_way = -(1 << 30)  # nobody waits for what will not come
            self._changed.notify_all()

    def _exchange(self, step: int, slot: Slot) -> None:
        slot.aside.arrive()
        coming = {source: self._memory.room_for(source, index) for source, index in self._sources.items()}
        moving = [dist.irecv(kept.aside.block, group=self._group, group_src=source) for source, kept in coming.items()]
        moving += [dist.isend(slot.aside.block, group=self._group, group_dst=buddy) for buddy in self._buddies]
        for one in moving:
            if one is not None:  # a rank outside the group has nothing to wait for
                one.wait()
        for kept in coming.values():
            kept.step = step
