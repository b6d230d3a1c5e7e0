"""What is saved of the training state of a run: in run.dir, in node-local storage, and in the workers' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.local_catalog import LocalCatalog
from raytrain_hpc.checkpoint.local_directory import LocalDirectory
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.backend import WorkerGroup
from raytrain_hpc.driver.checkpoint_finder import CheckpointFinder, ResumePoint
from raytrain_hpc.driver.run_recorder import RunRecorder
from raytrain_hpc.driver.run_setup import make_paths_absolute
from raytrain_hpc.elastic.audit_verdict import CORRUPT, FAULTY_DEVICE, SUSPECTED
from raytrain_hpc.elastic.state_partition import find_newest_complete_step
from raytrain_hpc.errors import CheckpointCorruptedError, WorkerFailedError

_REMOVAL_TIMEOUT_S = 30.0


class SavedState:
    """The checkpoints of a run and the state in its workers' memory, compared. Call between generations.

    `catalog`: of the checkpoints in node-local storage; None: there are none.
    """

    def __init__(
        self,
        config: Config,
        store: CheckpointStore,
        catalog: LocalCatalog | None,
        finder: CheckpointFinder,
        recorder: RunRecorder,
        lease: Lease,
    ) -> None:
        self._config, self._store, self._catalog = config, store, catalog
        self._finder, self._recorder, self._lease = finder, recorder, lease

    @property
    def listed_local_names(self) -> tuple[str, ...]:
        """The local checkpoints in the catalog when `find_resume_point` was last called."""
        return self._finder.listed_local_names

    def find_resume_point(self, workers: WorkerGroup, infos: Sequence[Mapping[str, Any]]) -> ResumePoint | None:
        """Return the newest complete checkpoint, after those that are being published; None if there is none.

        `infos`: facts of the ranks of the next generation, in rank order.
        """
        self._recorder.wait_for_checkpoints()
        return self._finder.find(workers, infos)

    def exclude(self, point: ResumePoint, error: CheckpointCorruptedError) -> None:
        """Never return this checkpoint again: a rank has found it damaged."""
        self._finder.exclude(point, error)

    def distrust_newer(self, failure: WorkerFailedError, generation: int) -> None:
        """Exclude the checkpoints that a faulty rank may have spoilt since the last audit. Raises CheckpointError."""
        recorder = self._recorder
        if failure.trusted_step is not None:
            step = min(recorder.verified_step, failure.trusted_step)
        elif failure.kind in (FAULTY_DEVICE, SUSPECTED):
            step = recorder.verified_step
        elif failure.kind == CORRUPT and self._config.fault.audit_interval:
            step = recorder.audited_step
        else:
            return
        recorder.wait_for_checkpoints()
        self._store.distrust(step, generation, f"rank {failure.rank}, {failure.kind}")

    def is_memory_outdated(self, workers: WorkerGroup) -> bool:
        """Return whether a checkpoint is newer than the state in memory, as after a save between two snapshots.

        One that the run cannot resume from does not count. Raises CheckpointError if storage fails.
        """
        self._recorder.wait_for_checkpoints()
        memory_step = find_memory_step(workers)
        return memory_step is not None and any(
            step > memory_step and self._store.is_usable(step) for step in self._store.list_steps()
        )

    def is_checkpoint_missing(self, step: int) -> bool:
        """Return whether the settings ask for a checkpoint of `step` in the run directory, and it is not there."""
        return is_checkpoint_due(self._config, step) and not self._recorder.has_checkpoint(step)

    def is_saved(self, workers: WorkerGroup) -> bool:
        """Return whether no state in memory is newer than the newest checkpoint in run.dir, which is the result's then.

        False if there is no checkpoint. Raises LeaseLostError if another driver took over.
        """
        self._recorder.wait_for_checkpoints()
        newest = self._finder.find_in_run_directory()
        self._lease.check()
        if newest is None or (find_memory_step(workers) or 0) > newest.step:
            return False
        self._recorder.totals.checkpoint_path = str(newest.path)
        return True

    def remove_local_checkpoints(self, workers: WorkerGroup) -> None:
        """Delete all checkpoints in node-local storage if the run has its last one in run.dir. Call at its end.

        Raises CheckpointError if storage fails.
        """
        if self._catalog is None:
            return
        self._recorder.wait_for_checkpoints()
        if self._recorder.has_checkpoint(self._recorder.committed_step):
            self._catalog.clear()
            workers.call_on_nodes(
                partial(_remove_local_directory, make_paths_absolute(self._config)), _REMOVAL_TIMEOUT_S
            )


def _remove_local_directory(config: Config) -> None:
    LocalDirectory.open(config).remove()


def find_memory_step(workers: WorkerGroup) -> int | None:
    """Return the newest step whose whole state is in memory, of workers or nodes. Call between generations."""
    in_workers = [candidate.state_parts for candidate in workers.list_candidates()]
    return find_newest_complete_step([*in_workers, workers.list_held_parts()])


def recall_missed_metrics(workers: WorkerGroup, after_step: int) -> list[dict[str, Any]]:
    """Return the metrics of the steps in memory after `after_step`, the last one that the driver knows."""
    memory_step = find_memory_step(workers)
    return [] if memory_step is None else workers.recall_metrics(after_step, memory_step)


def is_checkpoint_due(config: Config, step: int) -> bool:
    """Return whether the settings ask for a checkpoint of `step` in run.dir. One that is due by time is not known."""
    publish_interval = config.checkpoint.publish_interval
    interval = 0 if publish_interval == AUTO else int(publish_interval)
    return bool(step == config.train.steps or (step and interval and step % interval == 0))
