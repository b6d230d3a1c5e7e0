"""Checkpointer of one rank: which shards it writes, when, and how it reports them to the driver."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from raytrain_hpc.checkpoint.async_writer import AsyncCheckpointWriter
from raytrain_hpc.checkpoint.local_directory import LocalDirectory
from raytrain_hpc.checkpoint.manifest import get_shard_name
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import AUTO
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import CheckpointError
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.state.shard_index import StateIndex, assign_writers
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
from raytrain_hpc.storage.location import Location

AUTO_INTERVAL_S = 600.0  # seconds between checkpoints with checkpoint.interval=auto


class Checkpointer:
    """Writer of the checkpoint shards assigned to this rank: copies them, then writes them in the background.

    Each distinct slice is written by exactly one of the ranks that hold it, balanced by bytes. With a local tier, every
    checkpoint is written to node-local storage, and those of the run directory are uploaded from there.
    """

    def __init__(
        self,
        state: ShardedState,
        indexes: list[StateIndex],
        context: ParallelContext,
        store: CheckpointStore,
        spec: WorkerSpec,
        emit: Callable[[Record], None],
    ):
        """Initialize. Raises CheckpointError if `checkpoint.local_dir` is no path on this node."""
        self._store, self._generation, self._config = store, spec.generation, spec.config.checkpoint
        self._spec = spec
        self._rank = context.rank
        self._local = LocalDirectory.open(spec.config) if self._config.local_dir else None
        # A bound method would form a reference cycle, which keeps the state and its file on disk alive after the run.
        self._verified: dict[int, int] = {}  # by saved step, the last step that was verified by then
        self._report = partial(_emit_report, emit, context.rank, spec.generation, self._verified)
        self._emit = emit
        self._shards = _select_shards(state, indexes, context)
        self._writer = AsyncCheckpointWriter(self._report, socket.gethostname())
        self._last_time, self._last_step = spec.last_checkpoint_time or time.time(), 0
        self._is_last_published, self._verified_step = False, spec.verified_step

    def remove_leftovers(self) -> None:
        """Clean the node's local storage if the generation starts from a checkpoint or initial weights.

        Call before the first step.
        """
        spec = self._spec
        if self._local is not None and spec.memory_step is None:
            # In a fresh start, no rank writes before all are here: files of this generation are those of another run.
            before = spec.generation + 1 if spec.is_fresh_start else spec.generation
            self._local.remove_leftovers(spec.listed_local_checkpoints, before)

    def mark_verified(self, step: int) -> None:
        """Take note that audits have verified the state of `step`; see the metadata of checkpoints."""
        self._verified_step = step

    def is_time_due(self) -> bool:
        """Return whether `checkpoint.interval=auto` asks for a checkpoint, by this rank's clock.

        Clocks differ between ranks: the step's all-reduce makes all ranks save at the same step.
        """
        return self._config.interval == AUTO and time.time() - self._last_time >= AUTO_INTERVAL_S

    def should_save(self, step: int) -> bool:
        """Return whether `checkpoint.interval`, as a number of steps, asks for a checkpoint at this step."""
        interval = self._config.interval
        return interval != AUTO and int(interval) > 0 and step % int(interval) == 0

    def get_last_due_step(self, step: int) -> int:
        """Return the last step up to `step` of which one was due in the run directory in this generation, or 0."""
        interval = self._config.publish_interval
        if interval == AUTO:
            return self._last_step
        return step // int(interval) * int(interval) if interval else 0

    def has_saved(self, step: int) -> bool:
        """Return whether the last `save` in this generation was that of `step`."""
        return step == self._last_step > 0

    def save(self, step: int, *, publish: bool) -> float:
        """Copy the state of `step` and write it in the background. Return the seconds that training waited.

        `publish`: also in the run directory, whether or not `checkpoint.upload_interval` asks for it. A storage error
        is reported as a record and not raised, since it must not end the run.
        """
        publish = publish or self._local is None or self._is_publish_due(step)
        self._last_time, self._last_step, self._is_last_published = time.time(), step, publish
        self._verified[step] = min(self._verified_step, step)
        path, local_path = self._create_path(step) if publish else None, self._create_local_path(step)
        if path is None and local_path is None:
            return 0.0
        wait, pre_write = not self._config.async_, partial(self._prune_local, step)
        return self._writer.save(self._shards, path, step, wait=wait, local_path=local_path, pre_write=pre_write)

    def publish(self, step: int) -> None:
        """Write the checkpoint of `step`, the last that was saved, to the run directory as well unless it is there."""
        if self._is_last_published or not self.has_saved(step):
            return
        self._is_last_published = True
        if (path := self._create_path(step)) is not None:
            self._writer.upload_last(path, step)

    def _is_publish_due(self, step: int) -> bool:
        interval = self._config.upload_interval
        return interval == AUTO or step % int(interval) == 0

    def _create_path(self, step: int) -> Location | None:
        """Return the path of this rank's file in the run directory, or None after a reported error."""
        try:
            return self._store.create_staging(step, self._generation) / get_shard_name(self._rank)
        except CheckpointError as error:
            self._report({"step": step, "tier": "run", "error": str(error), "seconds": 0.0})
            return None

    def _create_local_path(self, step: int) -> Path | None:
        """Return the path of this rank's file in node-local storage, or None without it or after a reported error."""
        if self._local is None:
            return None
        try:
            return self._local.create(step, self._generation) / get_shard_name(self._rank)
        except OSError as error:
            problem = f"{self._local.root} cannot be created: {error.strerror}"
            self._report({"step": step, "tier": "local", "error": problem, "seconds": 0.0})
            return None

    def _prune_local(self, step: int) -> None:
        """Delete old checkpoints of the node before that of `step` is written. Deleting large files takes time."""
        if self._local is not None:
            fallback_steps = (self._verified[step],) if self._spec.config.fault.audit_interval else ()
            self._local.prune(step, self._config.local_keep, fallback_steps)

    def label(self, step: int, labels: Sequence[str]) -> None:
        """Give labels to the checkpoint of `step`, when it is published: the newest of each label is kept.

        Call on all ranks. A checkpoint with a label is always in the run directory.
        """
        if labels:
            self.publish(step)
        if labels and self._rank == 0:
            self._emit({"type": "label", "step": step, "labels": list(labels)})

    def wait_for_staging(self) -> None:
        """Wait for the copy of the last `save` to complete. Call before the state changes."""
        self._writer.wait_for_staging()

    def finish(self) -> None:
        """Wait until all shards are written."""
        self._writer.finish()


def _emit_report(
    emit: Callable[[Record], None], rank: int, generation: int, verified: Mapping[int, int], report: Record
) -> None:
    verified_step = verified.get(report["step"], 0)
    emit({"type": "shard", "rank": rank, "generation": generation, "verified_step": verified_step, **report})


def _select_shards(state: ShardedState, indexes: list[StateIndex], context: ParallelContext) -> list[StateShard]:
    assigned = assign_writers(indexes)[context.rank]
    return [state.get_shard(name, number) for name, number in assigned]
