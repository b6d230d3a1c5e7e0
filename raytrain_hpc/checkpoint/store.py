"""The checkpoints of a run: written by ranks, published atomically by one driver, verified, and pruned.

    ROOT/step-00000100/manifest.json            expected files, each with a checksum
    ROOT/step-00000100/rank-00000.safetensors   shard file of one rank
    ROOT/labels.json                            label -> step of a checkpoint that is not pruned
    ROOT/untrusted.json                         checkpoints that a rank with a faulty device may have spoilt

Ranks write into a staging directory of their generation only (directory_publisher.py, object_publisher.py). The driver
publishes it in one operation after every rank has reported. A rank of an aborted generation can therefore never change
a published checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from raytrain_hpc.checkpoint.directory_publisher import DirectoryPublisher
from raytrain_hpc.checkpoint.manifest import (
    MANIFEST_FILE,
    Checkpoint,
    ShardReport,
    build_manifest,
)
from raytrain_hpc.checkpoint.object_publisher import ObjectPublisher
from raytrain_hpc.checkpoint.retention import select_kept_steps
from raytrain_hpc.checkpoint.verification import (
    find_gap,
    find_size_problem,
    get_step_name,
    read_if_complete,
    verify_checkpoint,
)
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError
from raytrain_hpc.storage.location import Location, get_modified_time, list_directory_names, write_atomically
from raytrain_hpc.storage.object_path import ObjectPath

_STEP_PATTERN = re.compile(r"step-(\d+)")
LABELS_FILE = "labels.json"
_UNTRUSTED_FILE = "untrusted.json"


class Publisher(Protocol):
    """Publishes checkpoints in one kind of storage."""

    def get_files_directory(self, generation: int) -> str:
        """Return the directory of the shard files below that of the manifest; empty if they lie beside it."""

    def get_staging_path(self, step: int, generation: int) -> Location:
        """Return the directory into which the ranks of a generation write."""

    def create_staging(self, step: int, generation: int) -> Location:
        """Create that directory, unless another rank has, and return it. Raises CheckpointError."""

    def discard(self, step: int, generation: int) -> None:
        """Delete what the ranks have written. Never raises."""

    def list_abandoned(self, generation: int) -> list[tuple[int, int]]:
        """Return step and generation of the unpublished files of generations before `generation`. Raises OSError."""

    def publish(self, step: int, generation: int, manifest: Mapping[str, Any], pre_publish: Callable[[], None]) -> None:
        """Publish what the ranks have written, in one operation, replacing an earlier checkpoint. Raises OSError.

        `pre_publish` is called right before.
        """

    def is_unfinished(self, step: int) -> bool:
        """Return whether the directory of a step holds files of a checkpoint that was not published. Raises OSError."""

    def delete(self, step: int) -> None:
        """Delete a checkpoint such that it is never seen in part. Raises OSError."""

    def remove_leftovers(self) -> None:
        """Remove what interrupted operations have left. Raises CheckpointError."""


class CheckpointStore:
    """The checkpoints under `root`, which is created with the first one. Only one driver at a time may change it."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self._publisher: Publisher = ObjectPublisher(root) if isinstance(root, ObjectPath) else DirectoryPublisher(root)
        self._damaged_steps = set[int]()  # of checkpoints in which a reader has found damage that sizes do not show

    def get_path(self, step: int) -> Location:
        """Return the directory of the checkpoint of `step`, whether or not it exists."""
        return self.root / get_step_name(step)

    def create_staging(self, step: int, generation: int) -> Location:
        """Create the directory into which the ranks of this generation write, unless another rank has. Return it.

        Generation numbers only increase, so no two generations share a directory. Raises CheckpointError if the
        directory cannot be created.
        """
        return self._publisher.create_staging(step, generation)

    def discard(self, step: int, generation: int) -> None:
        """Delete the staging directory of an unfinished checkpoint. Call if a rank could not write its shard."""
        self._publisher.discard(step, generation)

    def list_abandoned(self, generation: int) -> list[tuple[int, int]]:
        """Return step and generation of the unpublished files of generations before `generation`, for `discard`.

        Call when no checkpoint of those is to be published any more. A rank of theirs may still write: its report is
        ignored. Raises CheckpointError if storage fails.
        """
        with self._translate_errors():
            return self._publisher.list_abandoned(generation)

    def publish(
        self,
        step: int,
        generation: int,
        reports: Sequence[ShardReport],
        meta: Mapping[str, Any],
        pre_publish: Callable[[], None],
    ) -> Location:
        """Publish the files in the staging directory as the checkpoint of `step`, replacing an earlier one.

        Returns its path. Call in the driver with the reports of all ranks of the generation. `pre_publish` is called
        right before and must raise if this driver may no longer publish. Afterwards the checkpoint either exists
        completely or not at all; on failure the staging directory is removed. Raises the exception of `pre_publish`.
        Raises CheckpointError if the reports do not cover whole tensors, if a file does not match its report, or if
        storage fails.
        """
        published = False
        try:
            manifest = self._build_manifest(step, generation, reports, meta)
            self._publisher.publish(step, generation, manifest, pre_publish)
            published = True
            self._damaged_steps.discard(step)
        except OSError as error:
            raise CheckpointError(f"{self.get_path(step)} cannot be published: {error.strerror}") from error
        finally:
            if not published:
                self.discard(step, generation)
        return self.get_path(step)

    def _build_manifest(
        self, step: int, generation: int, reports: Sequence[ShardReport], meta: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Check the shard files against their reports and build the manifest. Raises CheckpointError."""
        directory = self._publisher.get_files_directory(generation)
        manifest = build_manifest(step, generation, reports, meta, directory)
        if gap := find_gap(reports):
            raise CheckpointError(f"step {step} cannot be published: no rank has written {gap}")
        staging = self._publisher.get_staging_path(step, generation)
        for report in reports:
            if problem := find_size_problem(staging / report.file, report.checksum.bytes):
                raise CheckpointError(f"step {step} cannot be published: {problem}")
        return manifest

    def list_steps(self) -> list[int]:
        """Return the steps of all checkpoints with a manifest, ascending. Nothing is verified.

        Raises CheckpointError if storage does not answer.
        """
        with self._translate_errors():
            return [step for step, path in self._list_directories() if (path / MANIFEST_FILE).is_file()]

    def get_newest_time(self) -> float:
        """Return the Unix time at which the newest checkpoint was published, or 0 if there is none.

        Raises CheckpointError if storage does not answer.
        """
        steps = self.list_steps()
        with self._translate_errors():
            return get_modified_time(self.get_path(steps[-1]) / MANIFEST_FILE) if steps else 0.0

    def _list_directories(self) -> list[tuple[int, Location]]:
        """Return (step, path) of all `step-*` directories, with or without a manifest, by ascending step."""
        with self._translate_errors():
            names = list_directory_names(self.root)
        matches = (_STEP_PATTERN.fullmatch(name) for name in names)
        return sorted((int(match[1]), self.root / match[0]) for match in matches if match)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.root} cannot be read: {error.strerror}") from error

    def verify(self, step: int) -> Checkpoint:
        """Read every byte of the checkpoint of `step` and compare the checksums with the manifest.

        Raises CheckpointCorruptedError naming the file and the problem.
        """
        return verify_checkpoint(self.get_path(step))

    def find_newest_valid(
        self,
        on_corrupted: Callable[[Location, str], None],
        check: Callable[[Location], Checkpoint] = verify_checkpoint,
        on_untrusted: Callable[[Location, str], None] | None = None,
    ) -> Checkpoint | None:
        """Return the newest checkpoint that passes verification; None if there is none. Call before resuming a run.

        Calls `on_corrupted(path, problem)` for each newer one that fails, newest first, and `on_untrusted`, by default
        the same, for each one that is not trusted.
        `check(path)` returns a checkpoint or raises CheckpointCorruptedError; `check_checkpoint` suffices if
        `read_state` loads it.
        """
        for step, path in reversed(self._list_directories()):
            with self._translate_errors():
                is_unfinished = self._publisher.is_unfinished(step)
            if is_unfinished:
                continue
            try:
                checkpoint = check(path)
            except CheckpointCorruptedError as error:
                self._damaged_steps.add(step)
                on_corrupted(path, str(error))
                continue
            self._damaged_steps.discard(step)
            if reason := self.find_distrust(checkpoint.step, checkpoint.generation):
                (on_untrusted or on_corrupted)(path, reason)
                continue
            return checkpoint
        return None

    def distrust(self, after_step: int, generation: int, reason: str) -> None:
        """Never return the checkpoints of later steps than `after_step` again that were saved up to this generation.

        Those that later generations save in their place are trusted. Node-local ones are included, whether or not there
        is one here. Call in the driver that holds the lease, if the state after that step is the last one that is known
        to be right. Raises CheckpointError if storage fails.
        """
        entry = {"after_step": after_step, "generation": generation, "reason": reason}
        content = json.dumps([*self._read_untrusted(), entry], indent=2) + "\n"
        self._write(self.root / _UNTRUSTED_FILE, content)

    def find_distrust(self, step: int, generation: int) -> str | None:
        """Return why the checkpoint of a step that a generation has saved is not trusted; None if it is.

        Raises CheckpointError if that is not known, as storage fails.
        """
        return _find_distrust(self._read_untrusted(), step, generation)

    def is_usable(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is there, trusted and not known to be damaged. Reads no shard file.

        Raises CheckpointError if storage fails.
        """
        generation = self._find_intact_generation(step)
        return generation is not None and self.find_distrust(step, generation) is None

    def _find_intact_generation(self, step: int) -> int | None:
        """Return the generation that saved the checkpoint of `step`; None if that is known to be damaged."""
        checkpoint = None if step in self._damaged_steps else read_if_complete(self.get_path(step))
        return None if checkpoint is None else checkpoint.generation

    def is_only_start_trusted(self) -> bool:
        """Return whether the last state that was known to be right, when trust was last lost, is that of the start."""
        entries = self._read_untrusted()
        return bool(entries) and entries[-1]["after_step"] == 0

    def _read_untrusted(self) -> list[dict[str, Any]]:
        path = self.root / _UNTRUSTED_FILE
        try:
            return [dict(entry) for entry in json.loads(path.read_bytes())]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; remove it to trust all checkpoints") from error

    def prune(self, keep: int, fallback_steps: Collection[int] = ()) -> list[Location]:
        """Delete checkpoints older than the newest `keep` ones, and return the deleted paths. `keep=0` deletes nothing.

        Kept are also those with a label and, for each of `fallback_steps`, the newest one that is not newer: a fault
        that the next audit finds leads back to it. Only trusted checkpoints with a readable manifest, files of the
        expected size and no known damage count, so the last usable one is never deleted. Those that are not trusted are
        deleted, of whatever step, once there are `keep` usable ones. Raises CheckpointError if storage fails.
        """
        directories = self._list_directories()
        intact = [(step, self._find_intact_generation(step)) for step, _ in directories]
        entries = self._read_untrusted()
        untrusted_steps = {step for step, of in intact if of is not None and _find_distrust(entries, step, of)}
        usable_steps = [step for step, of in intact if of is not None and step not in untrusted_steps]
        if keep <= 0 or not usable_steps:
            return []
        oldest_kept, are_enough = usable_steps[-keep:][0], len(usable_steps) >= keep
        kept_steps = {*self.read_labels().values(), *select_kept_steps(usable_steps, keep, fallback_steps)}
        deleted = []
        for step, path in directories:
            if step in kept_steps or not (are_enough if step in untrusted_steps else step < oldest_kept):
                continue
            try:
                self._publisher.delete(step)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be deleted: {error.strerror}") from error
            deleted.append(path)
        return deleted

    def read_labels(self) -> dict[str, int]:
        """Return the step of each label. Raises CheckpointError if the file cannot be read."""
        path = self.root / LABELS_FILE
        try:
            return {str(label): int(step) for label, step in json.loads(path.read_bytes()).items()}
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
        self._write(path, content)

    def _write(self, path: Location, content: str) -> None:
        try:
            if isinstance(self.root, Path):
                self.root.mkdir(exist_ok=True)  # not its parent: if that is gone, its file system is not mounted
            write_atomically(path, content.encode())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error

    def find(self, step: int | str | None) -> Checkpoint | None:
        """Return the checkpoint of a step or label, verified; None: the newest valid one, or None if there is none.

        Raises CheckpointError if there is no such step or label, and CheckpointCorruptedError if verification fails.
        """
        if step is None:
            return self.find_newest_valid(lambda path, reason: None)
        if isinstance(step, str):
            labels = self.read_labels()
            if step not in labels:
                known = ", ".join(labels) or "there are none"
                raise CheckpointError(f"{self.root}: no checkpoint has the label {step!r}; known labels: {known}")
            step = labels[step]
        if step not in (steps := self.list_steps()):
            known = ", ".join(map(str, steps)) or "there are none"
            raise CheckpointError(f"step={step}: {self.root} has no checkpoint of this step; steps: {known}")
        return self.verify(step)

    def remove_leftovers(self) -> None:
        """Remove unfinished checkpoints and deletions of a driver that died.

        Call in the driver that holds the lease, before its first checkpoint. If a crash interrupted the replacement of
        a checkpoint, the earlier one is restored. Raises CheckpointError if storage fails.
        """
        self._publisher.remove_leftovers()


def _find_distrust(entries: Sequence[Mapping[str, Any]], step: int, generation: int) -> str | None:
    """Return which entry of untrusted.json names the checkpoint of a step that a generation has saved, as text."""
    for entry in entries:
        if step > entry["after_step"] and generation <= entry["generation"]:
            return f"saved after step {entry['after_step']}, the last one known to be right: {entry['reason']}"
    return None
