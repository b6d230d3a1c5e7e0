"""How a rank's snapshots come to outlive it: opened by another rank of its node, or copied to one of another node."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raytrain_hpc.distributed.handshake import Told
from raytrain_hpc.distributed.process_groups import host_group
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.snapshot.memory_store import Kept, LastSteps, Snapshots
from raytrain_hpc.snapshot.replicator import Copying
from raytrain_hpc.snapshot.shared_memory import OpenedSteps, Opening, shared_steps
from raytrain_hpc.training.snapshot_manager import keeps_snapshots


class Buddies:
    """What a rank does about it in one generation, by `spec.buddies`.

    On one node nothing is sent: a rank takes its snapshots in memory that its buddy has open. A GPU's are copied there
    all the same, since it wants page-locked memory. `own`: where this rank's own snapshots go, None where it does not
    matter; `openings`: where others find them.
    """

    def __init__(self, spec: WorkerSpec, rank: int, memory: Snapshots | None, device: torch.device):
        """Collective where copies are sent: it makes their group."""
        self._memory, self._rank = memory, rank
        self._pairs = spec.buddies if memory is not None and keeps_snapshots(spec.config) else ()
        self._opens = spec.one_node and device.type == "cpu"
        self._group = host_group() if self._pairs and not self._opens else None
        self.own: LastSteps | None = None
        self.openings: list[Opening] = []
        if self._opens and any(source == rank for source, _ in self._pairs):
            self.own, self.openings = shared_steps()

    def opened(self, told: Told, note: Callable[[str], None]) -> dict[int, Kept]:
        """The snapshots of the ranks whose buddy this one is. What cannot be opened is noted."""
        opened: dict[int, Kept] = {}
        for source in (source for source, buddy in self._pairs if self._opens and buddy == self._rank):
            try:
                opened[source] = OpenedSteps(told.shared[source], told.holdings[source])
            except OSError as error:
                note(
                    f"rank {self._rank} cannot open the snapshots of rank {source}, though they are on one node: "
                    f"{error}; should that be lost, the run goes on from a checkpoint"
                )
        return opened

    def copying(self, told: Told) -> Copying | None:
        """What sends snapshots, where any are sent."""
        if self._memory is None or self._group is None:
            return None
        return Copying(self._memory, self._rank, self._pairs, told.holdings, self._group)
