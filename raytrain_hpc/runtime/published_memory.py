"""What a worker tells the agent of its node to hold open: shared memory that is to outlive the worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from raytrain_hpc.snapshot.shared_file import SharedMemoryHandle, SnapshotHandles


@dataclass(frozen=True)
class PublishedMemory:
    """Shared memory of one worker in a generation.

    `snapshots`: by rank of that generation, its own and the replicas that it receives. `metrics`: the journal of the
    metrics of committed steps, None: another rank has it.
    """

    generation: int
    snapshots: Mapping[int, SnapshotHandles] = field(default_factory=dict)
    metrics: SharedMemoryHandle | None = None

    def to_json(self) -> str:
        """Return a JSON text."""
        return json.dumps([self.generation, list(self.snapshots.items()), self.metrics])

    @classmethod
    def from_json(cls, text: str) -> PublishedMemory:
        """Parse what `to_json` has returned."""
        generation, snapshots, metrics = json.loads(text)
        handles = {rank: SnapshotHandles.from_json(data) for rank, data in snapshots}
        return cls(generation, handles, None if metrics is None else SharedMemoryHandle(*metrics))
