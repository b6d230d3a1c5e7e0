"""The catalog, in the run directory, of the checkpoints in node-local storage: one manifest per checkpoint.

    ROOT/step-00000100-g3/manifest.json    files of a checkpoint that the ranks of generation 3 hold on their nodes

By it, a later start knows which checkpoints its nodes may hold, and what their content must be. A manifest is created
once, and only if there is none: a driver that was replaced cannot change those of its successor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raytrain_hpc.checkpoint.local_directory import get_local_name, parse_local_name
from raytrain_hpc.checkpoint.manifest import MANIFEST_FILE, Checkpoint, ShardReport, build_manifest, read_manifest
from raytrain_hpc.checkpoint.retention import select_kept_steps
from raytrain_hpc.checkpoint.verification import find_gap
from raytrain_hpc.errors import CheckpointError
from raytrain_hpc.storage.location import Location, create_file, list_directory_names
from raytrain_hpc.storage.object_path import ObjectPath

HOSTS_KEY = "hosts"  # in `meta`: shard file -> host name of the node that wrote it
_DIRECTORY = "local_checkpoints"  # in the run directory


class LocalCatalog:
    """The manifests of a run's local checkpoints. Only one driver at a time may change it.

    `find_distrust(step, generation)`: returns why that checkpoint is not trusted, see `CheckpointStore.find_distrust`.
    """

    def __init__(
        self, run_directory: Location, find_distrust: Callable[[int, int], str | None] = lambda step, generation: None
    ) -> None:
        self.root, self._find_distrust = run_directory / _DIRECTORY, find_distrust

    def list_names(self) -> list[str]:
        """Return the names of all checkpoints, by ascending step and generation.

        Raises CheckpointError if storage does not answer.
        """
        try:
            names = list_directory_names(self.root)
        except OSError as error:
            raise CheckpointError(f"{self.root} cannot be read: {error.strerror}") from error
        keys = {key: name for name in names if (key := parse_local_name(name)) is not None}
        return [keys[key] for key in sorted(keys)]

    def list_steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending. Raises CheckpointError if storage does not answer."""
        return [key[0] for name in self.list_names() if (key := parse_local_name(name)) is not None]

    def read(self, name: str) -> Checkpoint:
        """Read a manifest. Raises CheckpointCorruptedError, or CheckpointError if storage does not answer."""
        return read_manifest(self.root / name)

    def publish(
        self,
        step: int,
        generation: int,
        reports: Sequence[ShardReport],
        meta: Mapping[str, Any],
        pre_publish: Callable[[], None],
    ) -> Location:
        """Add the checkpoint that these files on the nodes are, and return the directory of its manifest.

        Arguments and errors are those of `CheckpointStore.publish`.
        """
        if gap := find_gap(reports):
            raise CheckpointError(f"local checkpoint of step {step} cannot be published: no rank has written {gap}")
        hosts = {report.file: report.host for report in reports}
        manifest = build_manifest(step, generation, reports, {**meta, HOSTS_KEY: hosts})
        path = self.root / get_local_name(step, generation)
        content = json.dumps(manifest).encode()
        pre_publish()
        try:
            create_file(path / MANIFEST_FILE, content)
        except FileExistsError as error:
            # Equal: the answer to the request was lost, and it was sent again.
            if (path / MANIFEST_FILE).read_bytes() != content:
                raise CheckpointError(f"{path} cannot be published: another driver has published it") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be published: {error.strerror}") from error
        return path

    def discard(self, step: int, generation: int) -> None:
        """Do nothing: unfinished files are on the nodes, which delete them when the next generation starts."""

    def list_abandoned(self, generation: int) -> list[tuple[int, int]]:
        """Return nothing, for the same reason."""
        return []

    def set_labels(self, step: int, labels: Sequence[str]) -> None:
        """Do nothing: a checkpoint with a label is one in the run directory."""

    def prune(self, keep: int, fallback_steps: Collection[int] = ()) -> list[Location]:
        """Delete the manifests of checkpoints older than the newest `keep` ones, of those that are not trusted, and of
        those that a later generation has left behind: it resumed from an earlier step and came to its own newest one.

        For each of `fallback_steps`, the newest one that is not newer is kept too. Nothing is deleted unless one is
        trusted. Returns their directories. Raises CheckpointError if storage fails.
        """
        keys = [key for name in self.list_names() if (key := parse_local_name(name)) is not None]
        trusted = [key for key in keys if self._find_distrust(*key) is None]
        if not trusted:
            return []
        newest_generation = max(generation for _, generation in trusted)
        newest_step = max(step for step, generation in trusted if generation == newest_generation)
        kept_steps = select_kept_steps((step for step, _ in trusted if step <= newest_step), keep, fallback_steps)
        kept = {key for key in trusted if key[0] in kept_steps}
        return self._delete([get_local_name(*key) for key in keys if key not in kept])

    def clear(self) -> None:
        """Delete all manifests. Raises CheckpointError if deleting fails."""
        self._delete(self.list_names())

    def _delete(self, names: Sequence[str]) -> list[Location]:
        paths = [self.root / name for name in names]
        for path in paths:
            try:
                path.delete_tree() if isinstance(path, ObjectPath) else shutil.rmtree(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be deleted: {error.strerror}") from error
        return paths
