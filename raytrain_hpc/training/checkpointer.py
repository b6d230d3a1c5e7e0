"""Checkpointer of one rank: which shards it writes, when, and how it reports them to the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from raytrain_hpc.checkpoint.async_writer import AsyncCheckpointWriter
from raytrain_hpc.checkpoint.manifest import get_shard_name
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import AUTO, CheckpointConfig
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import CheckpointError
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.state.shard_index import StateIndex, assign_writers
from raytrain_hpc.state.sharded_state import ShardedState, StateShard

AUTO_INTERVAL_S = 600.0  # seconds between checkpoints with checkpoint.interval=auto


class Checkpointer:
    """Writer of the checkpoint shards assigned to this rank: copies them, then writes them in the background.

    Each distinct slice is written by exactly one of the ranks that hold it, balanced by bytes. `last_time`: Unix time
    of the last checkpoint, or of the start of the run if there is none; 0: now.
    """

    def __init__(
        self,
        state: ShardedState,
        indexes: list[StateIndex],
        context: ParallelContext,
        store: CheckpointStore,
        generation: int,
        config: CheckpointConfig,
        emit: Callable[[Record], None],
        *,
        last_time: float,
    ):
        self._store, self._generation, self._config = store, generation, config
        self._rank = context.rank
        # A bound method would form a reference cycle, which keeps the state and its file on disk alive after the run.
        self._report = partial(_emit_report, emit, context.rank, generation)
        self._emit = emit
        self._shards = _select_shards(state, indexes, context)
        self._writer = AsyncCheckpointWriter(self._report)
        self._last_time, self._last_step = last_time or time.time(), 0

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
        """Return the last step up to `step` of which a checkpoint was due in this generation, or 0."""
        interval = self._config.interval
        if interval == AUTO:
            return self._last_step
        return step // int(interval) * int(interval) if interval else 0

    def has_saved(self, step: int) -> bool:
        """Return whether the last `save` in this generation was that of `step`."""
        return step == self._last_step > 0

    def save(self, step: int) -> float:
        """Copy the state of `step` and write it in the background. Return the seconds that training waited.

        A storage error is reported as a record and not raised, since it must not end the run.
        """
        self._last_time, self._last_step = time.time(), step
        try:
            staging = self._store.create_staging(step, self._generation)
        except CheckpointError as error:
            self._report({"step": step, "error": str(error)})
            return 0.0
        return self._writer.save(self._shards, staging / get_shard_name(self._rank), step, wait=not self._config.async_)

    def label(self, step: int, labels: Sequence[str]) -> None:
        """Give labels to the checkpoint of `step`, when it is published: the newest of each label is kept."""
        if labels and self._rank == 0:
            self._emit({"type": "label", "step": step, "labels": list(labels)})

    def wait_for_staging(self) -> None:
        """Wait for the copy of the last `save` to complete. Call before the state changes."""
        self._writer.wait_for_staging()

    def finish(self) -> None:
        """Wait until all shards are written."""
        self._writer.finish()


def _emit_report(emit: Callable[[Record], None], rank: int, generation: int, report: Record) -> None:
    emit({"type": "shard", "rank": rank, "generation": generation, **report})


def _select_shards(state: ShardedState, indexes: list[StateIndex], context: ParallelContext) -> list[StateShard]:
    assigned = assign_writers(indexes)[context.rank]
    return [state.get_shard(name, number) for name, number in assigned]
