"""One rank's part of a checkpoint: what it writes, when, and how the driver hears of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from raytrain_hpc.checkpoint.async_writer import AsyncCheckpointWriter
from raytrain_hpc.checkpoint.manifest import get_shard_name
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import CheckpointConfig
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import CheckpointError
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.state.shard_index import StateIndex, assign_writers
from raytrain_hpc.state.sharded_state import ShardedState, StateShard


class Checkpointer:
    """Copies this rank's share of the state at a step and writes it behind the next steps.

    Every distinct slice is written by exactly one of the ranks that hold it, balanced by bytes.
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
    ):
        self._store, self._generation, self._config = store, generation, config
        self._rank = context.rank
        # No method of this: a circle of references would keep the state, and its scratch on disk, after the run.
        self._report = partial(_emit_report, emit, context.rank, generation)
        self._shards = _select_shards(state, indexes, context)
        self._writer = AsyncCheckpointWriter(self._report)

    def should_save(self, step: int) -> bool:
        """Whether the settings ask for a checkpoint at this step."""
        return self._config.every > 0 and step % self._config.every == 0

    def save(self, step: int) -> float:
        """Copy the state of `step` and write it behind the next steps. Returns the seconds the step waited.

        A disk that refuses is reported, not raised: the run is worth more than one checkpoint.
        """
        try:
            staging = self._store.create_staging(step, self._generation)
        except CheckpointError as error:
            self._report({"step": step, "error": str(error)})
            return 0.0
        return self._writer.save(self._shards, staging / get_shard_name(self._rank), step, wait=not self._config.async_)

    def wait_for_staging(self) -> None:
        """Wait until the state of the last `save` may change."""
        self._writer.wait_for_staging()

    def finish(self) -> None:
        """Wait until everything is written."""
        self._writer.finish()


def _emit_report(emit: Callable[[Record], None], rank: int, generation: int, report: Record) -> None:
    emit({"type": "shard", "rank": rank, "generation": generation, **report})


def _select_shards(state: ShardedState, indexes: list[StateIndex], context: ParallelContext) -> list[StateShard]:
    mine = assign_writers(indexes)[context.rank]
    return [state.get_shard(name, number) for name, number in mine]
