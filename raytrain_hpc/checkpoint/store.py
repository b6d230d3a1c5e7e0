"""The checkpoints of a run on disk: published atomically by one driver, verified, and pruned.

    ROOT/step-00000100/manifest.json            what the directory must hold, with a checksum a file
    ROOT/step-00000100/rank-00000.safetensors   what one rank wrote
    ROOT/.staging-step-00000200-g3/             being written by the ranks of generation 3

Ranks only ever write into a staging directory. The driver publishes it, by one rename, once every rank has reported.
A rank that was given up on can therefore never change a published checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from raytrain_hpc.checkpoint.manifest import (
    MANIFEST_FILE,
    Checkpoint,
    FileChecksum,
    ShardReport,
    build_index,
    build_manifest,
    read_manifest,
)
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError
from raytrain_hpc.state.shard_index import Box, StateIndex, TensorSlices, find_missing

_STEP_PATTERN = re.compile(r"step-(\d+)")
_REPLACED_PATTERN = re.compile(r"\.replaced-(step-\d+)")
_HASH_THREADS = 4


class CheckpointStore:
    """The checkpoints under `root`, which is created with the first one. One driver at a time may change it."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def get_path(self, step: int) -> Path:
        """Where the checkpoint of this step is or would be."""
        return self.root / f"step-{step:08d}"

    def create_staging(self, step: int, generation: int) -> Path:
        """The directory that the ranks of this generation write into, made by whichever comes first.

        Generation numbers only grow, so that no two generations share one. Raises CheckpointError where it cannot be
        made. The directory around `root` is not: where that is gone, so is what is mounted there.
        """
        path = self._get_staging_path(step, generation)
        try:
            self.root.mkdir(exist_ok=True)
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be made: {error.strerror}") from error
        return path

    def discard(self, step: int, generation: int) -> None:
        """Give up an unfinished checkpoint: a rank could not write its part."""
        shutil.rmtree(self._get_staging_path(step, generation), ignore_errors=True)

    def _get_staging_path(self, step: int, generation: int) -> Path:
        return self.root / f".staging-{self.get_path(step).name}-g{generation}"

    def publish(
        self,
        step: int,
        generation: int,
        reports: Sequence[ShardReport],
        meta: Mapping[str, Any],
        pre_publish: Callable[[], None],
    ) -> Path:
        """Turn the staging directory into the checkpoint of `step`, replacing an earlier one, and return its path.

        `reports` are those of all ranks of the generation. `guard` is called right before the rename and must raise
        where this driver may not publish any more. Either the complete checkpoint is there afterwards, or none of it;
        when publishing fails the staging directory is removed. Raises what `guard` raises, and CheckpointError where
        the reports do not add up to whole tensors, a file is not as reported, or the disk refuses.
        """
        staging = self._get_staging_path(step, generation)
        published = False
        try:
            self._finalize(staging, step, generation, reports, meta)
            pre_publish()
            self._rename(staging, self.get_path(step))
            published = True
        except OSError as error:
            raise CheckpointError(f"{self.get_path(step)} cannot be published: {error.strerror}") from error
        finally:
            if not published:
                shutil.rmtree(staging, ignore_errors=True)
        return self.get_path(step)

    def _finalize(
        self, staging: Path, step: int, generation: int, reports: Sequence[ShardReport], meta: Mapping[str, Any]
    ) -> None:
        """Check what the ranks wrote against their reports, and add the manifest."""
        manifest = build_manifest(step, generation, reports, meta)
        if gap := _find_gap(build_index(reports)):
            raise CheckpointError(f"step {step} cannot be published: no rank has written {gap}")
        for report in reports:
            if problem := _find_size_problem(staging / report.file, report.bytes):
                raise CheckpointError(f"step {step} cannot be published: {problem}")
        with (staging / MANIFEST_FILE).open("w") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(staging)

    def _rename(self, staging: Path, final: Path) -> None:
        """Rename over whatever is there. An earlier directory steps aside first; `discard_staging` mends a crash."""
        aside = final.with_name(f".replaced-{final.name}")
        replaces = final.exists()
        if replaces:
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        try:
            staging.rename(final)
        except OSError:
            if replaces:
                aside.rename(final)
            raise
        _sync_directory(self.root)
        shutil.rmtree(aside, ignore_errors=True)

    def list_steps(self) -> list[int]:
        """Steps with a manifest, ascending. Nothing is verified."""
        return [step for step, path in self._list_directories() if (path / MANIFEST_FILE).is_file()]

    def _list_directories(self) -> list[tuple[int, Path]]:
        """Every `step-*` directory, with a manifest or without, by ascending step."""
        if not self.root.is_dir():
            return []
        found = ((_STEP_PATTERN.fullmatch(path.name), path) for path in self.root.iterdir())
        return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())

    def verify(self, step: int) -> Checkpoint:
        """Read every byte of the checkpoint of `step` and hold it against the manifest.

        Raises CheckpointDamaged naming the file and what is wrong with it.
        """
        return _verify(self.get_path(step))

    def find_newest_valid(self, on_corrupted: Callable[[Path, str], None]) -> Checkpoint | None:
        """The newest checkpoint that verifies; None where there is none.

        Each newer directory that does not is passed to `on_damaged` with the reason, newest first.
        """
        for _, path in reversed(self._list_directories()):
            try:
                return _verify(path)
            except CheckpointCorruptedError as error:
                on_corrupted(path, str(error))
        return None

    def prune(self, keep: int) -> list[Path]:
        """Delete all but the newest `keep` checkpoints, and what is older than those. `keep=0` deletes nothing.

        Only checkpoints with a readable manifest and files of the right size count as kept, so the last one that
        could be loaded is never deleted. Returns what was deleted; raises CheckpointError where deleting fails.
        """
        directories = self._list_directories()
        good = [step for step, path in directories if _has_expected_files(path)]
        if keep <= 0 or not good:
            return []
        oldest_kept = good[-keep:][0]
        deleted = []
        for step, path in directories:
            if step >= oldest_kept:
                break
            # Out of sight first: a deletion that is cut short must not look like a damaged checkpoint.
            hidden = path.with_name(f".pruned-{path.name}")
            try:
                path.rename(hidden)
                shutil.rmtree(hidden)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be deleted: {error.strerror}") from error
            deleted.append(path)
        return deleted

    def remove_leftovers(self) -> None:
        """Clear what a driver that died has left: unfinished checkpoints and unfinished deletions.

        For the driver that holds the run, before its first checkpoint. A checkpoint that had stepped aside for a new
        one which never came is put back. Raises CheckpointError where the disk refuses.
        """
        if not self.root.is_dir():
            return
        for path in list(self.root.iterdir()):
            aside = _REPLACED_PATTERN.fullmatch(path.name)
            try:
                if aside and not (self.root / aside[1]).exists():
                    path.rename(self.root / aside[1])
                elif path.name.startswith((".staging-step-", ".replaced-step-", ".pruned-step-")):
                    shutil.rmtree(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be cleared: {error.strerror}") from error


def _find_gap(index: StateIndex) -> str | None:
    """The first region of a tensor that nobody holds."""
    whole = StateIndex(TensorSlices(t.name, t.shape, t.dtype, (Box.from_shape(t.shape),)) for t in index.values())
    for name, region in find_missing([index], whole):
        return f"{name}{region}"
    return None


def _verify(path: Path) -> Checkpoint:
    checkpoint = read_manifest(path)
    if path.name != f"step-{checkpoint.step:08d}":
        raise CheckpointCorruptedError(f"{path}: {MANIFEST_FILE} is that of step {checkpoint.step}")
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        problems = pool.map(_find_file_problem, (path / name for name in checkpoint.files), checkpoint.files.values())
        for problem in problems:
            if problem:
                raise CheckpointCorruptedError(problem)
    return checkpoint


def _find_file_problem(path: Path, expected: FileChecksum) -> str | None:
    if problem := _find_size_problem(path, expected.bytes):
        return problem
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    if found != expected.sha256:
        return f"{path}: checksum is {found[:12]}..., the manifest says {expected.sha256[:12]}..."
    return None


def _find_size_problem(path: Path, expected: int) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path}: {'missing' if isinstance(error, FileNotFoundError) else error.strerror}"
    return None if size == expected else f"{path}: {size} bytes, expected {expected}"


def _has_expected_files(path: Path) -> bool:
    """Whether the manifest reads and every file has its size: cheap, where `verify` reads every byte."""
    try:
        checkpoint = read_manifest(path)
    except CheckpointCorruptedError:
        return False
    return not any(_find_size_problem(path / name, expected.bytes) for name, expected in checkpoint.files.items())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
