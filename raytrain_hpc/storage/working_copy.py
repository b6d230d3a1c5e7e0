"""Local directory for the small files of a run whose directory is in an object store, uploaded in intervals."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raytrain_hpc.background_thread import run_in_background
from raytrain_hpc.storage.location import Location
from raytrain_hpc.storage.object_path import ObjectPath, Version

GROWING_FILE = "metrics.jsonl"  # grows with every step; its earlier part is uploaded once, as numbered parts
_PART_NAME = "metrics-{:04d}.jsonl"
_PART_BYTES = 4 * 2**20
_INTERVAL_S = 5.0
_BYTES_PER_SECOND = 2**20  # of one file that grows: the larger it is, the rarer it is uploaded
_DOWNLOADED_DIRECTORIES = {"timeline": "", "profile": ".kernels.json"}  # with the end of the names; traces are large
_SKIPPED_DIRECTORIES = {"wandb"}  # synchronized by its own library


def get_working_directory(location: Location) -> Path:
    """Return the local directory for the files of a run: its directory, or the working copy of this process.

    The working copy is created. `WorkingCopy` fills it and uploads its changes.
    """
    if isinstance(location, Path):
        return location
    path = find_working_directory(location, os.getpid())
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        for other in path.parent.glob("*-*"):  # of processes that were killed
            if not Path(f"/proc/{other.name.rpartition('-')[2]}").exists():
                shutil.rmtree(other, ignore_errors=True)
    return path


def find_working_directory(location: Location, pid: int) -> Path:
    """Return the directory that `get_working_directory` returns in a process of this host. It may not exist."""
    if isinstance(location, Path):
        return location
    digest = hashlib.sha256(str(location).encode()).hexdigest()[:16]
    # Pids are those of a host and of a container's namespace, which may share the directory with others.
    namespace = f"{socket.gethostname()}-{Path('/proc/self/ns/pid').stat().st_ino}"
    return Path(tempfile.gettempdir()) / f"raytrain-{os.getuid()}" / namespace / f"{digest}-{pid}"


class WorkingCopy:
    """A working copy, and its synchronization with the object store.

    An object is replaced only if it is as this process has read or written it: a driver that was replaced by another
    cannot overwrite that one's files. Objects above 4 MiB are not protected in this way.
    """

    def __init__(
        self, remote: ObjectPath, path: Path, alarm: Callable[[str], None], *, overwrites: bool = False
    ) -> None:
        """Initialize without any transfer.

        Args:
            remote: The run directory.
            path: The local directory.
            alarm: Called with one line when uploads begin to fail.
            overwrites: Replace objects of other processes too, as ranks do, whose file names are theirs alone.
        """
        self._remote, self._alarm, self.path = remote, alarm, path
        self._overwrites = overwrites
        self._lock = threading.Lock()
        self._versions: dict[str, Version] = {}
        self._uploaded: dict[str, tuple[int, int]] = {}  # name -> (mtime in ns, size) when it was uploaded
        self._upload_times: dict[str, float] = {}
        self._removed: set[str] = set()  # names whose objects the next upload deletes
        self._num_parts, self._parts_bytes = 0, 0  # of the growing file that are uploaded
        self._is_failing = False

    def download(self) -> None:
        """Fill the working copy with the run's files, without checkpoints. Raises OSError."""
        with self._lock:
            parts: list[bytes] = []
            for info in sorted(self._remote.list_directory()[1], key=lambda info: info.path.name):
                content, version = info.path.read_with_version()
                if info.path.name.startswith(_PART_NAME.partition("{")[0]) and info.path.name != GROWING_FILE:
                    parts.append(content)  # listed by ascending name
                else:
                    self._versions[info.path.name] = version
                    self._write(info.path.name, content)
            for directory, suffix in _DOWNLOADED_DIRECTORIES.items():
                for info in (self._remote / directory).list_recursively():
                    if info.path.name.endswith(suffix):
                        self._write(f"{directory}/{info.path.name}", info.path.read_bytes())
            self._num_parts, self._parts_bytes = len(parts), sum(map(len, parts))
            if parts:
                path = self.path / GROWING_FILE
                self._write(GROWING_FILE, b"".join(parts) + (path.read_bytes() if path.exists() else b""))

    def _write(self, name: str, content: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._uploaded[name] = _get_state(path)

    def remove(self, name: str) -> None:
        """Delete a file; the next upload deletes its object, unless the file exists again. Raises OSError."""
        (self.path / name).unlink(missing_ok=True)
        self._removed.add(name)

    def upload(self, *, only_due: bool = False) -> None:
        """Upload all files that have changed. `only_due`: except large ones that were uploaded recently.

        Raises OSError; FileExistsError if another process has written one of the files.
        """
        with self._lock:
            self._delete_removed()
            for name, path in self._list_files():
                try:
                    state = _get_state(path)
                    is_due = not only_due or self._is_due(name, state[1])
                    if state != self._uploaded.get(name) and is_due:
                        self._upload_file(name, path)
                        self._uploaded[name], self._upload_times[name] = state, time.monotonic()
                except FileNotFoundError:
                    if path.exists():
                        raise
                    continue  # a temporary file that was renamed since it was listed

    def _delete_removed(self) -> None:
        """Delete the objects of files that were removed, unless another process has replaced them."""
        for name in sorted(self._removed):
            if name in self._versions and not (self.path / name).exists():
                target = self._remote / name
                if target.is_file() and target.read_with_version()[1] == self._versions[name]:
                    target.delete()
                del self._versions[name]
            self._removed.discard(name)

    def _is_due(self, name: str, size: int) -> bool:
        return time.monotonic() - self._upload_times.get(name, float("-inf")) >= size / _BYTES_PER_SECOND

    def _list_files(self) -> list[tuple[str, Path]]:
        return [
            (path.relative_to(self.path).as_posix(), path)
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
            and not path.name.endswith(".tmp")
            and not _SKIPPED_DIRECTORIES & set(path.relative_to(self.path).parts)
        ]

    def _upload_file(self, name: str, path: Path) -> None:
        if name != GROWING_FILE:
            self._upload_content(name, path.read_bytes())
            return
        with path.open("rb") as file:
            file.seek(self._parts_bytes)
            content = file.read()
        while len(content) > _PART_BYTES:
            end = content.rindex(b"\n", 0, _PART_BYTES) + 1
            (self._remote / _PART_NAME.format(self._num_parts)).write_bytes(content[:end])
            self._num_parts, self._parts_bytes, content = self._num_parts + 1, self._parts_bytes + end, content[end:]
        self._upload_content(name, content)

    def _upload_content(self, name: str, content: bytes) -> None:
        """Write an object on condition that no other process has written it."""
        target = self._remote / name
        if self._overwrites or len(content) > _PART_BYTES:
            target.upload([content], len(content))
            return
        version = self._versions.get(name)
        try:
            self._versions[name] = target.create(content) if version is None else target.replace(content, version)
        except FileExistsError:
            stored, stored_version = target.read_with_version()
            if stored != content:  # equal: the answer to the write was lost, and it was tried again
                raise
            self._versions[name] = stored_version

    @contextmanager
    def upload_in_background(self) -> Iterator[None]:
        """Upload changes every 5 s while the context is active, and all of them at its end. Failures are alarms."""

        def upload_until_done(done: threading.Event) -> None:
            while not done.wait(_INTERVAL_S):
                self._try_upload(only_due=True)

        try:
            with run_in_background("working-copy", upload_until_done):
                yield
        finally:
            self._try_upload(only_due=False)

    def _try_upload(self, *, only_due: bool) -> None:
        try:
            self.upload(only_due=only_due)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                path = error.filename or self._remote
                self._alarm(f"alarm: {path} cannot be written: {error.strerror}; the run continues")
            self._is_failing = True


def _get_state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
