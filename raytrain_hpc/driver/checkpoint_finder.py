"""Finder of the checkpoint to resume from: the newest complete one, in the run directory or on the workers' nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from raytrain_hpc.checkpoint.checksum import FileChecksum
from raytrain_hpc.checkpoint.local_catalog import HOSTS_KEY, LocalCatalog
from raytrain_hpc.checkpoint.local_directory import LocalDirectory, parse_local_name
from raytrain_hpc.checkpoint.manifest import Checkpoint
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.checkpoint.verification import check_checkpoint
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.backend import WorkerGroup
from raytrain_hpc.driver.run_setup import find_newest_checkpoint, make_paths_absolute
from raytrain_hpc.errors import CheckpointCorruptedError
from raytrain_hpc.runtime.worker_spec import LocalCheckpoint
from raytrain_hpc.storage.location import Location

_LIST_TIMEOUT_S = 30.0  # for a node to list its files
_READ_BYTES_PER_S = 100e6  # of a slow disk that holds all files: a node that takes longer is taken for lost


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from. `local`: None if it is in the run directory."""

    checkpoint: Checkpoint
    local: LocalCheckpoint | None = None

    @property
    def step(self) -> int:
        """The number of steps that were committed when it was saved."""
        return self.checkpoint.step

    def describe(self) -> str:
        """Return where it is, for a line of the log."""
        return str(self.checkpoint.path) if self.local is None else f"local checkpoint {self.local.name}"


class CheckpointFinder:
    """Finder of checkpoints in both tiers. Damaged ones are reported and skipped, with `warn(line)`.

    `catalog`: of the local checkpoints; None: there is no local tier. `listed_local_names`: those that were in it when
    a checkpoint was last looked for.
    """

    def __init__(
        self, config: Config, store: CheckpointStore, catalog: LocalCatalog | None, warn: Callable[[str], None]
    ) -> None:
        self._config, self._store, self._catalog, self._warn = config, store, catalog, warn
        self.listed_local_names: tuple[str, ...] = ()
        self._damage: dict[tuple[Location, int], str] = {}  # path, generation -> problem that a rank has found

    def exclude(self, point: ResumePoint, error: CheckpointCorruptedError) -> None:
        """Skip a checkpoint from now on: a rank that loaded it has found it damaged."""
        self._damage[point.checkpoint.path, point.checkpoint.generation] = str(error)

    def find_in_run_directory(self) -> Checkpoint | None:
        """Return the newest valid checkpoint in the run directory, or None. Raises as `find_newest_checkpoint`."""
        return find_newest_checkpoint(self._store, self._warn, self._check)

    def _check(self, path: Location) -> Checkpoint:
        """Check a checkpoint as far as its readers do not. Raises CheckpointCorruptedError."""
        return self._raise_known_damage(check_checkpoint(path))

    def _raise_known_damage(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint unless a rank has found it damaged. One that was saved again in its place is another."""
        if (key := (checkpoint.path, checkpoint.generation)) in self._damage:
            raise CheckpointCorruptedError(self._damage[key])
        return checkpoint

    def find(self, workers: WorkerGroup, infos: Sequence[Mapping[str, Any]]) -> ResumePoint | None:
        """Return the newest complete checkpoint of both tiers, or None if there is none.

        `infos`: facts of the ranks of the next generation, in rank order. Of two checkpoints of a step, the local one
        is faster. Raises CheckpointError if no checkpoint is valid, or if storage does not answer.
        """
        names = self.listed_local_names = () if self._catalog is None else tuple(self._catalog.list_names())
        newest_listed = max(self._store.list_steps(), default=0) if names else 0
        if (local := self._find_local(names, newest_listed, workers, infos)) is not None:
            return local
        try:
            newest = self.find_in_run_directory()
        except CheckpointCorruptedError:
            if (local := self._find_local(names, 0, workers, infos)) is None:
                raise
            return local
        newest_step = 0 if newest is None else newest.step
        if newest_step < newest_listed and (local := self._find_local(names, newest_step, workers, infos)) is not None:
            return local
        return None if newest is None else ResumePoint(newest)

    def _find_local(
        self, names: Sequence[str], min_step: int, workers: WorkerGroup, infos: Sequence[Mapping[str, Any]]
    ) -> ResumePoint | None:
        """Return the newest local checkpoint of at least `min_step` that the nodes hold completely, or None."""
        if self._catalog is None:
            return None
        for name in reversed(names):
            step, generation = parse_local_name(name) or (0, 0)
            if step < min_step:
                break
            if reason := self._store.find_distrust(step, generation):
                self._warn(f"local checkpoint of step {step} skipped: {reason}")
                continue
            try:
                checkpoint = self._raise_known_damage(self._catalog.read(name))
                return ResumePoint(checkpoint, self._locate(checkpoint, workers, infos))
            except CheckpointCorruptedError as error:
                self._warn(f"damaged checkpoint skipped: {error}")
            except _IncompleteError as error:
                self._warn(f"local checkpoint of step {step} skipped: {error}")
        return None

    def _locate(
        self, checkpoint: Checkpoint, workers: WorkerGroup, infos: Sequence[Mapping[str, Any]]
    ) -> LocalCheckpoint:
        """Return which files of a checkpoint the node of each rank has, verified.

        Raises _IncompleteError if no node has a file, and CheckpointCorruptedError if all that have it are damaged.
        """
        for read in (False, True):  # sizes first: they tell at once whether a node is missing
            files_by_node = self._check_nodes(checkpoint, workers, read=read)
            valid = {file for problems in files_by_node.values() for file, problem in problems.items() if not problem}
            for file in sorted(checkpoint.files.keys() - valid):
                problems = [problems[file] for problems in files_by_node.values() if file in problems]
                if problems:
                    raise CheckpointCorruptedError(problems[0])
                host = checkpoint.meta.get(HOSTS_KEY, {}).get(file, "another node")
                raise _IncompleteError(f"{file} was written on {host}, and is on no node of the run")
        files_by_rank = (files_by_node.get(info["node_id"], {}) for info in infos)
        return LocalCheckpoint(
            checkpoint.path.name,
            tuple(tuple(file for file, problem in problems.items() if not problem) for problems in files_by_rank),
        )

    def _check_nodes(self, checkpoint: Checkpoint, workers: WorkerGroup, *, read: bool) -> dict[str, dict[str, str]]:
        """Return, by node, the problem of each file of a checkpoint that the node has; "" if there is none."""
        config, name, files = make_paths_absolute(self._config), checkpoint.path.name, checkpoint.files
        total_bytes = sum(checksum.bytes for checksum in files.values())
        timeout_s = _LIST_TIMEOUT_S + (total_bytes / _READ_BYTES_PER_S if read else 0.0)
        return workers.call_on_nodes(partial(_check_files, config, name, files, read=read), timeout_s)


class _IncompleteError(Exception):
    """A file of a local checkpoint is on no node of the run."""


def _check_files(config: Config, name: str, files: Mapping[str, FileChecksum], *, read: bool) -> dict[str, str]:
    """Check the files of a local checkpoint on the node where this is called. See `LocalDirectory.check_files`."""
    return LocalDirectory.open(config).check_files(name, files, read=read)
