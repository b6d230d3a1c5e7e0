"""Copies of snapshots in another rank's memory, sent behind the steps: what outlives the loss of a node."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch.distributed as dist

from raytrain_hpc.snapshot.memory_store import SnapshotSlot, SnapshotStore
from raytrain_hpc.state.shard_index import StateIndex


class SnapshotReplicator:
    """Sends this rank's snapshots to its buddies, and keeps those of the ranks whose buddy it is.

    `pairs`: (rank, buddy). `indexes[r]`: what rank r holds. All ranks take snapshots of the same steps. `group`: of all
    ranks, between host memories, used by nobody else. A peer that is gone ends it without a word: the loop hears of
    that by itself, and a copy that is not whole is none.
    """

    def __init__(
        self,
        store: SnapshotStore,
        rank: int,
        pairs: Sequence[tuple[int, int]],
        indexes: Sequence[StateIndex],
        group: dist.ProcessGroup,
    ):
        self._store, self._group = store, group
        self._peers = [buddy for source, buddy in pairs if source == rank]
        self._sources = {source: indexes[source] for source, buddy in pairs if buddy == rank}
        self._queue: SimpleQueue[tuple[int, SnapshotSlot] | None] = SimpleQueue()
        self._num_pending, self._condition, self._is_closed = 0, threading.Condition(), False
        if self._peers or self._sources:
            threading.Thread(target=self._run, name="copying", daemon=True).start()

    def send_async(self, step: int, slot: SnapshotSlot) -> None:
        """Have the snapshot of a step copied; returns at once."""
        if self._peers or self._sources:
            with self._condition:
                self._num_pending += 1
            self._queue.put((step, slot))

    def wait(self) -> None:
        """Wait until everything is copied, or will never be."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_pending <= 0)

    def close(self) -> None:
        """The same, and no more will come."""
        self.wait()
        self.cancel()

    def cancel(self) -> None:
        """No more will come, and what is under way need not arrive."""
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None and not self._is_closed:
            try:
                self._exchange(*job)
            except RuntimeError:  # a peer is gone, or has left the generation
                break
            with self._condition:
                self._num_pending -= 1
                self._condition.notify_all()
        with self._condition:
            self._num_pending = -(1 << 30)  # nobody waits for what will not come
            self._condition.notify_all()

    def _exchange(self, step: int, slot: SnapshotSlot) -> None:
        slot.buffer.synchronize()
        coming = {source: self._store.reserve_replica(source, index) for source, index in self._sources.items()}
        moving = [dist.irecv(kept.buffer.block, group=self._group, group_src=source) for source, kept in coming.items()]
        moving += [dist.isend(slot.buffer.block, group=self._group, group_dst=buddy) for buddy in self._peers]
        for one in moving:
            if one is not None:  # a rank outside the group has nothing to wait for
                one.wait()
        for kept in coming.values():
            kept.step = step
