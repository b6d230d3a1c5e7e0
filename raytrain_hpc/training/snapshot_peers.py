"""How a rank's snapshots come to outlive it: opened by another rank of its node, or copied to one of another node."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raytrain_hpc.distributed.handshake import PeerInfo
from raytrain_hpc.distributed.process_groups import new_host_group
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.snapshot.memory_store import RankSnapshots, SnapshotRing, SnapshotStore
from raytrain_hpc.snapshot.replicator import SnapshotReplicator
from raytrain_hpc.snapshot.shared_memory import AttachedSnapshots, SharedMemoryHandle, create_shared_snapshots
from raytrain_hpc.training.snapshot_manager import snapshots_enabled


class SnapshotPeers:
    """What a rank does about it in one generation, by `spec.buddies`.

    On one node nothing is sent: a rank takes its snapshots in memory that its buddy has open. A GPU's are copied there
    all the same, since it wants page-locked memory. `own`: where this rank's own snapshots go, None where it does not
    matter; `openings`: where others find them.
    """

    def __init__(self, spec: WorkerSpec, rank: int, store: SnapshotStore | None, device: torch.device):
        """Collective where copies are sent: it makes their group."""
        self._store, self._rank = store, rank
        self._pairs = spec.replication_pairs if store is not None and snapshots_enabled(spec.config) else ()
        self._use_shared_memory = spec.is_single_node and device.type == "cpu"
        self._group = new_host_group() if self._pairs and not self._use_shared_memory else None
        self.own_snapshots: SnapshotRing | None = None
        self.handles: list[SharedMemoryHandle] = []
        if self._use_shared_memory and any(source == rank for source, _ in self._pairs):
            self.own_snapshots, self.handles = create_shared_snapshots()

    def attach_snapshots(self, peer_info: PeerInfo, log: Callable[[str], None]) -> dict[int, RankSnapshots]:
        """The snapshots of the ranks whose buddy this one is. What cannot be opened is noted."""
        opened: dict[int, RankSnapshots] = {}
        for source in (source for source, buddy in self._pairs if self._use_shared_memory and buddy == self._rank):
            try:
                opened[source] = AttachedSnapshots(peer_info.handles[source], peer_info.destination_indexes[source])
            except OSError as error:
                log(
                    f"rank {self._rank} cannot open the snapshots of rank {source}, though they are on one node: "
                    f"{error}; should that be lost, the run goes on from a checkpoint"
                )
        return opened

    def create_replicator(self, peer_info: PeerInfo) -> SnapshotReplicator | None:
        """What sends snapshots, where any are sent."""
        if self._store is None or self._group is None:
            return None
        return SnapshotReplicator(self._store, self._rank, self._pairs, peer_info.destination_indexes, self._group)
