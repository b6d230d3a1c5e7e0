"""Comparison of the state in the workers' memory with the checkpoints of a run."""

from __future__ import annotations

from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.backend import WorkerGroup
from raytrain_hpc.elastic.state_partition import find_newest_complete_step


def find_memory_step(workers: WorkerGroup) -> int | None:
    """Return the newest step whose whole state the workers hold together. Call between generations."""
    return find_newest_complete_step(candidate.state_parts for candidate in workers.list_candidates())


def is_memory_outdated(store: CheckpointStore, workers: WorkerGroup) -> bool:
    """Return whether a checkpoint is newer than the state in memory, as after a save between two snapshots."""
    memory_step = find_memory_step(workers)
    return memory_step is not None and any(step > memory_step for step in store.list_steps())


def is_checkpoint_due(config: Config, step: int) -> bool:
    """Return whether the settings ask for a checkpoint of `step`. One that is due by the time of day is not known."""
    interval = 0 if config.checkpoint.interval == AUTO else int(config.checkpoint.interval)
    return bool(step == config.train.steps or (step and interval and step % interval == 0))
