"""Replication of snapshots into the memory of other ranks, overlapped with training, to survive the loss of a node."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch.distributed as dist

from raytrain_hpc.snapshot.memory_store import SnapshotSlot, SnapshotStore
from raytrain_hpc.state.shard_index import StateIndex


class SnapshotReplicator:
    """A thread that sends this rank's snapshots to its peers and receives those of the ranks that have it as a peer.

    `pairs`: (rank, peer) pairs; the peer keeps a replica of the rank's snapshots. `indexes`: the index of the state of
    each rank, by rank. `group`: all ranks, for host memory, used by nothing else. All ranks must replicate the same
    steps in the same order. If a peer is lost, the thread ends without an error: the training loop detects the loss
    itself, and an incomplete replica is never marked as complete.
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
        self._peers = [peer for source, peer in pairs if source == rank]
        self._sources = {source: indexes[source] for source, peer in pairs if peer == rank}
        self._queue: SimpleQueue[tuple[int, SnapshotSlot] | None] = SimpleQueue()
        self._num_pending, self._condition, self._is_closed = 0, threading.Condition(), False
        if self._peers or self._sources:
            threading.Thread(target=self._run, name="copying", daemon=True).start()

    def send_async(self, step: int, slot: SnapshotSlot) -> None:
        """Replicate the snapshot of `step` in the background. The slot must not be reused before `wait` returns."""
        if self._peers or self._sources:
            with self._condition:
                self._num_pending += 1
            self._queue.put((step, slot))

    def wait(self) -> None:
        """Wait until all replications have finished or the thread has ended."""
        with self._condition:
            self._condition.wait_for(lambda: self._num_pending <= 0)

    def close(self) -> None:
        """Wait as `wait` does, then end the thread."""
        self.wait()
        self.cancel()

    def cancel(self) -> None:
        """End the thread without waiting. Replications that have not started are dropped."""
        self._is_closed = True
        self._queue.put(None)

    def _run(self) -> None:
        """Process replications in order until closed or until a peer is lost."""
        while (job := self._queue.get()) is not None and not self._is_closed:
            try:
                self._exchange(*job)
            except RuntimeError:  # a peer was lost or has left the generation
                break
            with self._condition:
                self._num_pending -= 1
                self._condition.notify_all()
        with self._condition:
            self._num_pending = -(1 << 30)  # releases all waiters, also of later calls
            self._condition.notify_all()

    def _exchange(self, step: int, slot: SnapshotSlot) -> None:
        """Send this rank's snapshot to its peers and receive the replicas of the same step."""
        slot.buffer.synchronize()
        replicas = {source: self._store.reserve_replica(source, index) for source, index in self._sources.items()}
        transfers = [
            dist.irecv(replica.buffer.block, group=self._group, group_src=source)
            for source, replica in replicas.items()
        ]
        transfers += [dist.isend(slot.buffer.block, group=self._group, group_dst=peer) for peer in self._peers]
        for transfer in transfers:
            if transfer is not None:  # None on a rank outside the group
                transfer.wait()
        for replica in replicas.values():
            replica.step = step
