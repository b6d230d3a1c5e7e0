"""Peers of a rank's snapshots: a rank of the same node that opens them, or one of another node that gets copies."""

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
    """Peers of one rank in one generation, by `spec.replication_pairs`.

    On a single node nothing is sent: a rank takes its snapshots in shared memory that its peer has open. Snapshots of a
    GPU are copied even there, since they need page-locked memory. `own_snapshots`: where this rank's snapshots go;
    None: private memory. `handles`: shared memory that peers open.
    """

    def __init__(self, spec: WorkerSpec, rank: int, store: SnapshotStore | None, device: torch.device):
        """Prepare the snapshots. Collective if copies are sent, since it creates their process group."""
        self._store, self._rank = store, rank
        self._pairs = spec.replication_pairs if store is not None and snapshots_enabled(spec.config) else ()
        self._use_shared_memory = spec.is_single_node and device.type == "cpu"
        self._group = new_host_group() if self._pairs and not self._use_shared_memory else None
        self.own_snapshots: SnapshotRing | None = None
        self.handles: list[SharedMemoryHandle] = []
        if self._use_shared_memory and any(source == rank for source, _ in self._pairs):
            self.own_snapshots, self.handles = create_shared_snapshots()

    def attach_snapshots(self, peer_info: PeerInfo, log: Callable[[str], None]) -> dict[int, RankSnapshots]:
        """Open the snapshots of the ranks that this rank is the peer of. Failures are logged."""
        attached: dict[int, RankSnapshots] = {}
        for source in (source for source, peer in self._pairs if self._use_shared_memory and peer == self._rank):
            try:
                attached[source] = AttachedSnapshots(peer_info.handles[source], peer_info.destination_indexes[source])
            except OSError as error:
                log(
                    f"rank {self._rank} cannot open the snapshots of rank {source} on the same node: "
                    f"{error}; if rank {source} is lost, the run resumes from a checkpoint"
                )
        return attached

    def create_replicator(self, peer_info: PeerInfo) -> SnapshotReplicator | None:
        """Return the replicator that sends snapshots to peers; None if none are sent."""
        if self._store is None or self._group is None:
            return None
        return SnapshotReplicator(self._store, self._rank, self._pairs, peer_info.destination_indexes, self._group)
