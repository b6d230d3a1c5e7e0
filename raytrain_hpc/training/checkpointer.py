"""One rank's part of a checkpoint: what it writes, when, and how the driver hears of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from raytrain_hpc.checkpoint.async_writer import CheckpointWriter
from raytrain_hpc.checkpoint.manifest import shard_name
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import CheckpointConfig
from raytrain_hpc.distributed.process_groups import Place
from raytrain_hpc.errors import CheckpointError
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.state.shard_index import StateIndex, assign_writers
from raytrain_hpc.state.sharded_state import Held, Holding


class Saver:
    """Copies this rank's share of the state at a step and writes it behind the next steps.

    Every distinct slice is written by exactly one of the ranks that hold it, balanced by bytes.
    """

    def __init__(
        self,
        holding: Holding,
        indexes: list[StateIndex],
        place: Place,
        store: CheckpointStore,
        generation: int,
        config: CheckpointConfig,
        emit: Callable[[Record], None],
    ):
        self._store, self._generation, self._config = store, generation, config
        self._rank = place.rank
        # No method of this: a circle of references would keep the state, and its scratch on disk, after the run.
        self._report = partial(_report, emit, place.rank, generation)
        self._mine = _own_share(holding, indexes, place)
        self._writer = CheckpointWriter(self._report)

    def due(self, step: int) -> bool:
        """Whether the settings ask for a checkpoint at this step."""
        return self._config.every > 0 and step % self._config.every == 0

    def save(self, step: int) -> float:
        """Copy the state of `step` and write it behind the next steps. Returns the seconds the step waited.

        A disk that refuses is reported, not raised: the run is worth more than one checkpoint.
        """
        try:
            staging = self._store.staging(step, self._generation)
        except CheckpointError as error:
            self._report({"step": step, "error": str(error)})
            return 0.0
        return self._writer.save(self._mine, staging / shard_name(self._rank), step, wait=not self._config.async_)

    def copied(self) -> None:
        """Wait until the state of the last `save` may change."""
        self._writer.copied()

    def finish(self) -> None:
        """Wait until everything is written."""
        self._writer.finish()


def _report(emit: Callable[[Record], None], rank: int, generation: int, report: Record) -> None:
    emit({"type": "shard", "rank": rank, "generation": generation, **report})


def _own_share(holding: Holding, indexes: list[StateIndex], place: Place) -> list[Held]:
    mine = assign_writers(indexes)[place.rank]
    return [holding.at(name, number) for name, number in mine]
