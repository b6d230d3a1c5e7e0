"""The checkpoints of a run on disk: written by ranks, published atomically by one driver, verified, and pruned.

    ROOT/step-00000100/manifest.json            expected files, each with a checksum
    ROOT/step-00000100/rank-00000.safetensors   shard file of one rank
    ROOT/.staging-step-00000200-g3/             being written by the ranks of generation 3
    ROOT/labels.json                            label -> step of a checkpoint that is not pruned

Ranks write into a staging directory only. The driver publishes it by one rename after every rank has reported. A rank
of an aborted generation can therefore never change a published checkpoint.
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
LABELS_FILE = "labels.json"
_HASH_THREADS = 4


class CheckpointStore:
    """The checkpoints under `root`, which is created with the first one. Only one driver at a time may change it."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def get_path(self, step: int) -> Path:
        """Return the directory of the checkpoint of `step`, whether or not it exists."""
        return self.root / f"step-{step:08d}"

    def create_staging(self, step: int, generation: int) -> Path:
        """Create the directory into which the ranks of this generation write, unless another rank has. Return it.

        Generation numbers only increase, so no two generations share a directory. The parent of `root` is not created:
        if it is gone, its file system is not mounted. Raises CheckpointError if the directory cannot be created.
        """
        path = self._get_staging_path(step, generation)
        try:
            self.root.mkdir(exist_ok=True)
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be created: {error.strerror}") from error
        return path

    def discard(self, step: int, generation: int) -> None:
        """Delete the staging directory of an unfinished checkpoint. Call if a rank could not write its shard."""
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
        """Rename the staging directory to the checkpoint of `step`, replacing an earlier one. Return its path.

        Call in the driver with the reports of all ranks of the generation. `pre_publish` is called right before the
        rename and must raise if this driver may no longer publish. Afterwards the checkpoint either exists completely
        or not at all; on failure the staging directory is removed. Raises the exception of `pre_publish`. Raises
        CheckpointError if the reports do not cover whole tensors, if a file does not match its report, or if storage
        fails.
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
        """Check the shard files against their reports and write the manifest. Raises CheckpointError or OSError."""
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
        _sync_directory(self.root)
        shutil.rmtree(replaced_path, ignore_errors=True)

    def list_steps(self) -> list[int]:
        """Return the steps of all checkpoints with a manifest, ascending. Nothing is verified."""
        return [step for step, path in self._list_directories() if (path / MANIFEST_FILE).is_file()]

    def get_newest_time(self) -> float:
        """Return the Unix time at which the newest checkpoint was published, or 0 if there is none."""
        steps = self.list_steps()
        return (self.get_path(steps[-1]) / MANIFEST_FILE).stat().st_mtime if steps else 0.0

    def _list_directories(self) -> list[tuple[int, Path]]:
        """Return (step, path) of all `step-*` directories, with or without a manifest, by ascending step."""
        if not self.root.is_dir():
            return []
        matches = ((_STEP_PATTERN.fullmatch(path.name), path) for path in self.root.iterdir())
        return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())

    def verify(self, step: int) -> Checkpoint:
        """Read every byte of the checkpoint of `step` and compare the checksums with the manifest.

        Raises CheckpointCorruptedError naming the file and the problem.
        """
        return _verify(self.get_path(step))

    def find_newest_valid(self, on_corrupted: Callable[[Path, str], None]) -> Checkpoint | None:
        """Return the newest checkpoint that passes verification; None if there is none. Call before resuming a run.

        Calls `on_corrupted(path, problem)` for each newer one that fails, newest first.
        """
        for _, path in reversed(self._list_directories()):
            try:
                return _verify(path)
            except CheckpointCorruptedError as error:
                on_corrupted(path, str(error))
        return None

    def prune(self, keep: int) -> list[Path]:
        """Delete checkpoints older than the newest `keep` ones, and return the deleted paths. `keep=0` deletes nothing.

        Those with a label are kept. Only checkpoints with a readable manifest and files of the expected size count
        towards `keep`, so the last loadable one is never deleted. Raises CheckpointError if deleting fails.
        """
        directories = self._list_directories()
        loadable_steps = [step for step, path in directories if _has_expected_files(path)]
        if keep <= 0 or not loadable_steps:
            return []
        oldest_kept, labelled_steps = loadable_steps[-keep:][0], set(self.read_labels().values())
        deleted = []
        for step, path in directories:
            if step >= oldest_kept:
                break
            if step in labelled_steps:
                continue
            # Hidden first: an interrupted deletion must not look like a corrupted checkpoint.
            hidden_path = path.with_name(f".pruned-{path.name}")
            try:
                path.rename(hidden_path)
                shutil.rmtree(hidden_path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be deleted: {error.strerror}") from error
            deleted.append(path)
        return deleted

    def read_labels(self) -> dict[str, int]:
        """Return the step of each label. Raises CheckpointError if the file cannot be read."""
        path = self.root / LABELS_FILE
        try:
            return {str(label): int(step) for label, step in json.loads(path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; remove it to drop its labels") from error

    def set_labels(self, step: int, labels: Sequence[str]) -> None:
        """Move `labels` to the checkpoint of `step`. Call in the driver that holds the lease.

        Raises CheckpointError if storage fails.
        """
        if not labels:
            return
        path = self.root / LABELS_FILE
        content = json.dumps(self.read_labels() | dict.fromkeys(labels, step), indent=2) + "\n"
        try:
            temporary = path.with_name(f".{LABELS_FILE}")
            temporary.write_text(content)
            temporary.rename(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error

    def find(self, step: int | str | None) -> Checkpoint | None:
        """Return the checkpoint of a step or label, verified; None: the newest valid one, or None if there is none.

        Raises CheckpointError if there is no such label, and CheckpointCorruptedError if verification fails.
        """
        if step is None:
            return self.find_newest_valid(lambda path, reason: None)
        if isinstance(step, str):
            labels = self.read_labels()
            if step not in labels:
                known = ", ".join(labels) or "there are none"
                raise CheckpointError(f"{self.root}: no checkpoint has the label {step!r}; known labels: {known}")
            step = labels[step]
        return self.verify(step)

    def remove_leftovers(self) -> None:
        """Remove unfinished checkpoints and deletions of a driver that died.

        Call in the driver that holds the lease, before its first checkpoint. If a crash interrupted the replacement of
        a checkpoint, the earlier one is restored. Raises CheckpointError if storage fails.
        """
        if not self.root.is_dir():
            return
        for path in list(self.root.iterdir()):
            match = _REPLACED_PATTERN.fullmatch(path.name)
            try:
                if match and not (self.root / match[1]).exists():
                    path.rename(self.root / match[1])
                elif path.name.startswith((".staging-step-", ".replaced-step-", ".pruned-step-")):
                    shutil.rmtree(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be removed: {error.strerror}") from error


def _find_gap(index: StateIndex) -> str | None:
    """Return the first region of a tensor that no box covers, as text; None if all tensors are complete."""
    complete = StateIndex(TensorSlices(t.name, t.shape, t.dtype, (Box.from_shape(t.shape),)) for t in index.values())
    for name, region in find_missing([index], complete):
        return f"{name}{region}"
    return None


def _verify(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every file. Raises CheckpointCorruptedError."""
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
    """Describe how a file differs from the manifest in size or checksum; None if it matches. Reads the whole file."""
    if problem := _find_size_problem(path, expected.bytes):
        return problem
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    if sha256 != expected.sha256:
        return f"{path}: checksum is {sha256[:12]}..., the manifest says {expected.sha256[:12]}..."
    return None


def _find_size_problem(path: Path, expected: int) -> str | None:
    """Describe why a file does not have the expected size in bytes; None if it does."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path}: {'missing' if isinstance(error, FileNotFoundError) else error.strerror}"
    return None if size == expected else f"{path}: {size} bytes, expected {expected}"


def _has_expected_files(path: Path) -> bool:
    """Return whether the manifest is readable and every file has its size. Cheap: reads no shard file."""
    try:
        checkpoint = read_manifest(path)
    except CheckpointCorruptedError:
        return False
    return not any(_find_size_problem(path / name, expected.bytes) for name, expected in checkpoint.files.items())


def _sync_directory(path: Path) -> None:
    """Sync a directory, so that renames in it survive a crash of the host."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
