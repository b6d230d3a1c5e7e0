"""Where a rank's snapshots are, and who has them besides: its node's agent, and a peer on the node or another one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raytrain_hpc.distributed.handshake import PeerInfo
from raytrain_hpc.distributed.process_groups import new_host_group
from raytrain_hpc.elastic.state_partition import compute_state_partition
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.snapshot.memory_store import RankSnapshots, SnapshotStore
from raytrain_hpc.snapshot.replicator import SnapshotReplicator
from raytrain_hpc.snapshot.shared_file import SnapshotHandles
from raytrain_hpc.snapshot.shared_memory import AttachedSnapshots, SharedSnapshots
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.training.snapshot_manager import snapshots_enabled


class SnapshotPeers:
    """Peers of one rank in one generation, by `spec.replication_pairs`, and the memory of its snapshots.

    On CPUs, snapshots of a partitioned state and received replicas are in shared memory, which the agent of the node
    holds open. On a single node nothing is sent: the peer of a rank has its memory open too. Snapshots of a GPU need
    page-locked memory of the process, and are always copied to peers. `own_snapshots`, `replicas`: where snapshots of
    this rank go, and those that it receives, by rank; None and empty: private memory.
    """

    def __init__(
        self, spec: WorkerSpec, rank: int, store: SnapshotStore | None, device: torch.device, index: StateIndex
    ):
        """Prepare the snapshots. Collective if copies are sent, since it creates their process group.

        `index`: that of this rank's state.
        """
        self._store, self._rank, self._generation = store, rank, spec.generation
        takes_snapshots = store is not None and snapshots_enabled(spec.config)
        self._pairs = spec.replication_pairs if takes_snapshots else ()
        self._is_shared = device.type == "cpu"
        self._is_sent = not (self._is_shared and spec.is_single_node)
        self._group = new_host_group() if self._pairs and self._is_sent else None
        is_partitioned = max(compute_state_partition(spec.layout)) > 0
        self.own_snapshots = SharedSnapshots(index) if takes_snapshots and self._is_shared and is_partitioned else None
        self.replicas: dict[int, SharedSnapshots] = {}

    @property
    def handles(self) -> SnapshotHandles | None:
        """The shared memory of this rank's snapshots; None if they are in private memory."""
        return None if self.own_snapshots is None else self.own_snapshots.handles

    def attach_snapshots(self, peer_info: PeerInfo, log: Callable[[str], None]) -> dict[int, RankSnapshots]:
        """Open the snapshots of the ranks that this rank is the peer of. Failures are logged."""
        attached: dict[int, RankSnapshots] = {}
        for source, peer in self._pairs:
            handles = peer_info.handles[source]
            if self._is_sent or peer != self._rank or handles is None:
                continue
            try:
                attached[source] = AttachedSnapshots(handles)
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
        if self._is_shared:
            sources = [source for source, peer in self._pairs if peer == self._rank]
            self.replicas = {source: SharedSnapshots(peer_info.destination_indexes[source]) for source in sources}
        return SnapshotReplicator(self._store, self._rank, self._pairs, peer_info.destination_indexes, self._group)

    def publish(self, control: ControlChannel) -> None:
        """Let the agent of the node hold the memory of the snapshots open, instead of that of earlier generations.

        Call when all ranks have restored their state, also if there are no snapshots in shared memory.
        """
        rings = {} if self.own_snapshots is None else {self._rank: self.own_snapshots, **self.replicas}
        handles = {rank: snapshots.handles for rank, snapshots in rings.items()}
        control.publish_memory(self._generation, handles, keeps_metrics=bool(handles) and self._rank == 0)
