"""Shared memory of a node's workers that the agent of the node holds open, so that it outlives them. Needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.runtime.published_memory import PublishedMemory
from raytrain_hpc.snapshot.journal import JournalReader
from raytrain_hpc.snapshot.shared_file import OpenedSnapshots, SnapshotHandles


@dataclass(frozen=True)
class HeldSnapshot:
    """A complete snapshot of a rank of a generation, and the handles by which workers open it."""

    generation: int
    rank: int
    step: int
    handles: SnapshotHandles


class HeldMemory:
    """Snapshots and metrics of a node's workers, by generation.

    Those of a generation are held until all workers of the next one on the node have two snapshots each: the second
    shows that every rank of the run has restored its state, and has taken a snapshot of it. If its state is not
    partitioned, workers take none there, and publish nothing before all ranks have restored it.
    """

    def __init__(self) -> None:
        self._published: dict[int, PublishedMemory] = {}  # by pid
        self._snapshots: dict[tuple[int, int, int], OpenedSnapshots] = {}  # by generation, pid, and rank of the state
        self._journals: dict[int, JournalReader] = {}  # by generation

    def update(self, published: Mapping[int, PublishedMemory]) -> None:
        """Open what the workers have published since the last call, and release what is no longer needed.

        `published`: by pid, of the current workers of the node.
        """
        for pid, memory in published.items():
            if memory != self._published.get(pid):
                with contextlib.suppress(OSError):  # the worker has ended, and its memory with it
                    self._open(pid, memory)
                    self._published[pid] = memory
        newest = max((memory.generation for memory in published.values()), default=0)
        if any(generation < newest for generation in self._list_generations()):
            self._release_before(newest, published)

    def keep_step(self, step: int) -> None:
        """Release all snapshots but those of `step`. Call when a generation begins that restores it."""
        for snapshots in self._snapshots.values():
            snapshots.keep_step(step)

    def clear(self) -> None:
        """Release everything. Call when a generation begins that restores nothing from memory."""
        self._snapshots, self._journals = {}, {}

    def list_snapshots(self) -> list[HeldSnapshot]:
        """Return the complete snapshots. Their handles are valid until those of other steps are released."""
        return [
            HeldSnapshot(generation, rank, step, snapshots.make_handles(step))
            for (generation, _, rank), snapshots in self._snapshots.items()
            for step in snapshots.steps
        ]

    def recall_metrics(self, after_step: int) -> list[tuple[int, Record]]:
        """Return the metrics of the steps after `after_step` that workers have kept here, with their generations."""
        return [
            (generation, metrics)
            for generation, journal in self._journals.items()
            for metrics in journal.read()
            if metrics["step"] > after_step
        ]

    def _open(self, pid: int, memory: PublishedMemory) -> None:
        opened = {
            (memory.generation, pid, rank): OpenedSnapshots(handles) for rank, handles in memory.snapshots.items()
        }
        if memory.metrics is not None:
            self._journals[memory.generation] = JournalReader(memory.metrics)
        self._snapshots |= opened

    def _list_generations(self) -> Iterable[int]:
        return {*self._journals, *(generation for generation, _, _ in self._snapshots)}

    def _release_before(self, newest: int, published: Mapping[int, PublishedMemory]) -> None:
        """Release the memory of generations before `newest`, if all workers have two snapshots in that one."""
        expected = [(newest, pid, rank) for pid, memory in published.items() for rank in memory.snapshots]
        is_published = all(memory.generation == newest for memory in published.values())
        if is_published and all(key in self._snapshots and len(self._snapshots[key].steps) == 2 for key in expected):
            self._snapshots = {key: snapshots for key, snapshots in self._snapshots.items() if key[0] >= newest}
            self._journals = {key: journal for key, journal in self._journals.items() if key >= newest}
