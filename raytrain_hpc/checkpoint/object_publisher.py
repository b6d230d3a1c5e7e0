"""Publishing checkpoints in an object store: files are uploaded to their final names, the manifest last, on condition.

    ROOT/step-00000100/manifest.json
    ROOT/step-00000100/g3/rank-00000.safetensors    written by the ranks of generation 3

Nothing is renamed, since object stores copy to rename. Without a manifest the files are not a checkpoint. The manifest
is created only if there is none, or replaces the version that was read: of two drivers, one publishes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from raytrain_hpc.checkpoint.manifest import MANIFEST_FILE, read_manifest
from raytrain_hpc.checkpoint.verification import get_step_name
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError
from raytrain_hpc.storage.object_path import ObjectPath
from raytrain_hpc.storage.unfinished_uploads import abort_unfinished_uploads

_STEP_PATTERN = re.compile(r"step-(\d{8,})")
_GENERATION_PATTERN = re.compile(r"g(\d+)")


class ObjectPublisher:
    """Publisher of checkpoints below a prefix of an object store."""

    def __init__(self, root: ObjectPath) -> None:
        self._root = root

    def get_files_directory(self, generation: int) -> str:
        """Return the directory of the shard files below that of the manifest."""
        return f"g{generation}"

    def get_staging_path(self, step: int, generation: int) -> ObjectPath:
        """Return the prefix below which the ranks of a generation write."""
        return self._root / get_step_name(step) / self.get_files_directory(generation)

    def create_staging(self, step: int, generation: int) -> ObjectPath:
        """Return the prefix below which the ranks of a generation write. It needs no creation."""
        return self.get_staging_path(step, generation)

    def discard(self, step: int, generation: int) -> None:
        """Delete what the ranks have uploaded. If storage fails, `remove_leftovers` of the next driver does so."""
        with suppress(OSError):
            self.get_staging_path(step, generation).delete_tree()

    def list_abandoned(self, generation: int) -> list[tuple[int, int]]:
        """Return step and generation of files of earlier generations that no manifest refers to. Raises OSError."""
        abandoned = []
        for name in self._root.list_directory()[0]:
            path = self._root / name
            step = _STEP_PATTERN.fullmatch(name)
            matches = [_GENERATION_PATTERN.fullmatch(directory) for directory in path.list_directory()[0]]
            earlier = [int(match[1]) for match in matches if match and int(match[1]) < generation]
            if step and earlier and (published := self._find_published_directory(path)) is not None:
                keys = [(int(step[1]), number) for number in earlier]
                abandoned += [key for key in keys if self.get_files_directory(key[1]) != published]
        return abandoned

    def _find_published_directory(self, path: ObjectPath) -> str | None:
        """Return the directory that the manifest of a step refers to; "" without one, None if it is damaged."""
        if not (path / MANIFEST_FILE).is_file():
            return ""
        try:
            return read_manifest(path).files_path.name
        except CheckpointCorruptedError:
            return None  # reported when the newest valid checkpoint is looked for; nothing is deleted before

    def publish(self, step: int, generation: int, manifest: Mapping[str, Any], pre_publish: Callable[[], None]) -> None:
        """Call `pre_publish` and write the manifest, on condition; then delete the files of the one it replaces.

        Raises OSError; FileExistsError if another driver has published this step in between.
        """
        path = self._root / get_step_name(step) / MANIFEST_FILE
        content = json.dumps(manifest).encode()
        try:
            _, version = path.read_with_version()
        except FileNotFoundError:
            version = None
        pre_publish()
        try:
            path.create(content) if version is None else path.replace(content, version)
        except FileExistsError:
            if path.read_bytes() != content:  # equal: the answer to the write was lost, and it was tried again
                raise
        if version is not None:
            with suppress(OSError):
                self._delete_other_generations(self._root / get_step_name(step), self.get_files_directory(generation))

    def is_unfinished(self, step: int) -> bool:
        """Return whether the files of a step have no manifest. Raises OSError."""
        return not (self._root / get_step_name(step) / MANIFEST_FILE).is_file()

    def delete(self, step: int) -> None:
        """Delete a checkpoint, the manifest first: if this is interrupted, the rest is a leftover. Raises OSError.

        What later generations than that of the manifest have uploaded is spared: they may be saving the step again.
        """
        path = self._root / get_step_name(step)
        match = _GENERATION_PATTERN.fullmatch(self._find_published_directory(path) or "")
        (path / MANIFEST_FILE).delete()
        if match is None:
            path.delete_tree()
            return
        for name in path.list_directory()[0]:
            other = _GENERATION_PATTERN.fullmatch(name)
            if other is None or int(other[1]) <= int(match[1]):
                (path / name).delete_tree()

    def remove_leftovers(self) -> None:
        """Remove files that no manifest refers to: of unfinished checkpoints, deletions and replacements.

        Call while no rank writes. Raises CheckpointError if storage fails.
        """
        try:
            abort_unfinished_uploads(self._root)
            for name in self._root.list_directory()[0]:
                self._remove_unreferenced(self._root / name)
        except OSError as error:
            raise CheckpointError(f"{self._root}: leftovers cannot be removed: {error.strerror}") from error

    def _remove_unreferenced(self, path: ObjectPath) -> None:
        published = self._find_published_directory(path)
        if published == "":
            path.delete_tree()
        elif published is not None:
            self._delete_other_generations(path, published)

    def _delete_other_generations(self, path: ObjectPath, kept_directory: str) -> None:
        for name in path.list_directory()[0]:
            if name != kept_directory:
                (path / name).delete_tree()
