"""Publishing checkpoints in a local directory: files are staged under a hidden name, and published by one rename.

ROOT/step-00000100/manifest.json, rank-00000.safetensors, ...
ROOT/.staging-step-00000200-g3/    being written by the ranks of generation 3
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raytrain_hpc.checkpoint.manifest import MANIFEST_FILE
from raytrain_hpc.checkpoint.verification import get_step_name
from raytrain_hpc.errors import CheckpointError

_STAGING_PATTERN = re.compile(r"\.staging-step-(\d+)-g(\d+)")
_REPLACED_PATTERN = re.compile(r"\.replaced-(step-\d+)")


class DirectoryPublisher:
    """Publisher of checkpoints below a local directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get_files_directory(self, generation: int) -> str:
        """Return the directory of the shard files below that of the manifest: they lie beside it."""
        return ""

    def get_staging_path(self, step: int, generation: int) -> Path:
        """Return the directory into which the ranks of a generation write."""
        return self._root / f".staging-{get_step_name(step)}-g{generation}"

    def create_staging(self, step: int, generation: int) -> Path:
        """Create the staging directory, unless another rank has, and return it.

        The parent of the root is not created: if it is gone, its file system is not mounted. Raises CheckpointError.
        """
        path = self.get_staging_path(step, generation)
        try:
            self._root.mkdir(exist_ok=True)
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be created: {error.strerror}") from error
        return path

    def discard(self, step: int, generation: int) -> None:
        """Delete the staging directory."""
        shutil.rmtree(self.get_staging_path(step, generation), ignore_errors=True)

    def list_abandoned(self, generation: int) -> list[tuple[int, int]]:
        """Return step and generation of the staging directories of earlier generations. Raises OSError."""
        names = (path.name for path in self._root.iterdir()) if self._root.is_dir() else ()
        keys = [(int(match[1]), int(match[2])) for name in names if (match := _STAGING_PATTERN.fullmatch(name))]
        return [key for key in keys if key[1] < generation]

    def publish(self, step: int, generation: int, manifest: Mapping[str, Any], pre_publish: Callable[[], None]) -> None:
        """Write the manifest, call `pre_publish`, and rename the staging directory. Raises OSError."""
        staging = self.get_staging_path(step, generation)
        with (staging / MANIFEST_FILE).open("w") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(staging)
        pre_publish()
        self._rename(staging, self._root / get_step_name(step))

    def _rename(self, staging: Path, final: Path) -> None:
        """Rename `staging` to `final`, replacing an earlier directory.

        The earlier one is moved to a hidden name first. After a crash between the two renames, `remove_leftovers` moves
        it back.
        """
        replaced_path = final.with_name(f".replaced-{final.name}")
        exists = final.exists()
        if exists:
            shutil.rmtree(replaced_path, ignore_errors=True)
            final.rename(replaced_path)
        try:
            staging.rename(final)
        except OSError:
            if exists:
                replaced_path.rename(final)
            raise
        _sync_directory(self._root)
        shutil.rmtree(replaced_path, ignore_errors=True)

    def is_unfinished(self, step: int) -> bool:
        """Return False: unfinished checkpoints are in staging directories."""
        return False

    def delete(self, step: int) -> None:
        """Delete a checkpoint. It is hidden first: an interrupted deletion must not look damaged. Raises OSError."""
        path = self._root / get_step_name(step)
        hidden_path = path.with_name(f".pruned-{path.name}")
        path.rename(hidden_path)
        shutil.rmtree(hidden_path)

    def remove_leftovers(self) -> None:
        """Remove unfinished checkpoints and deletions; restore one whose replacement was interrupted.

        Raises CheckpointError if storage fails.
        """
        if not self._root.is_dir():
            return
        for path in list(self._root.iterdir()):
            match = _REPLACED_PATTERN.fullmatch(path.name)
            try:
                if match and not (self._root / match[1]).exists():
                    path.rename(self._root / match[1])
                elif path.name.startswith((".staging-step-", ".replaced-step-", ".pruned-step-")):
                    shutil.rmtree(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be removed: {error.strerror}") from error


def _sync_directory(path: Path) -> None:
    """Sync a directory, so that renames in it survive a crash of the host."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
