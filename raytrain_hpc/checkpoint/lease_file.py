"""The file lease.json and its atomic update: under a file lock, or by conditional writes to an object store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from raytrain_hpc.errors import RunDirectoryError
from raytrain_hpc.storage.location import Location
from raytrain_hpc.storage.object_path import ObjectPath, Version

LEASE_FILE = "lease.json"
_MAX_ATTEMPTS = 20  # of a conditional write; each failure means that another driver has written


@dataclass(frozen=True)
class LeaseRecord:
    """The content of the lease file.

    `started`: start time of the process, in clock ticks since boot. `renewed`: Unix time in seconds.
    """

    generation: int
    owner: str
    host: str
    pid: int
    started: int
    renewed: float
    released: bool

    def is_same_lease(self, other: LeaseRecord) -> bool:
        """Return whether this is the record of `other`'s lease, of the same or an earlier generation.

        The file has an earlier generation if storage failed when the current one began.
        """
        differs = replace(self, renewed=0.0, generation=0) != replace(other, renewed=0.0, generation=0)
        return not differs and self.generation <= other.generation


UpdateFunction = Callable[[LeaseRecord | None], LeaseRecord]


class LeaseFile(Protocol):
    """The lease file of a run directory."""

    def read(self) -> LeaseRecord | None:
        """Return the record; None if there is none. Raises RunDirectoryError if it cannot be read."""

    def update(self, compute: UpdateFunction) -> LeaseRecord:
        """Replace the record by `compute(record)`, atomically towards other drivers, and return the new one.

        `compute` may be called several times. Raises what it raises, OSError if the file cannot be written, and
        RunDirectoryError if it cannot be read.
        """


def open_lease_file(directory: Location) -> LeaseFile:
    """Return the lease file of a run directory."""
    return ObjectLeaseFile(directory) if isinstance(directory, ObjectPath) else LocalLeaseFile(directory)


class LocalLeaseFile:
    """A lease file in a local or shared file system."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self) -> LeaseRecord | None:
        """See `LeaseFile`."""
        path = self._directory / LEASE_FILE
        try:
            return _parse(path, path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error

    def update(self, compute: UpdateFunction) -> LeaseRecord:
        """See `LeaseFile`. The directory must exist."""
        with self._lock():
            record = compute(self.read())
            self._write(record)
        return record

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold an exclusive file lock while the lease file is read and written.

        On a file system without locks no lock is taken: two drivers that start at the same instant may both proceed.
        """
        with (self._directory / f".{LEASE_FILE}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
            yield

    def _write(self, record: LeaseRecord) -> None:
        """Replace the file atomically, so that a reader never sees a partial one."""
        temporary = self._directory / f".{LEASE_FILE}.{record.pid}"
        try:
            with temporary.open("w") as file:
                json.dump(asdict(record), file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._directory / LEASE_FILE)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


class ObjectLeaseFile:
    """A lease file in an object store. Each write is on condition that the file is still as it was read."""

    def __init__(self, directory: ObjectPath) -> None:
        self._path = directory / LEASE_FILE

    def read(self) -> LeaseRecord | None:
        """See `LeaseFile`."""
        return self._read()[0]

    def _read(self) -> tuple[LeaseRecord | None, Version | None]:
        try:
            content, version = self._path.read_with_version()
        except FileNotFoundError:
            return None, None
        except OSError as error:
            raise RunDirectoryError(f"{self._path} cannot be read: {error.strerror}") from error
        return _parse(self._path, content), version

    def update(self, compute: UpdateFunction) -> LeaseRecord:
        """See `LeaseFile`."""
        stored, version = self._read()
        for _ in range(_MAX_ATTEMPTS):
            record = compute(stored)
            content = json.dumps(asdict(record)).encode()
            try:
                self._path.create(content) if version is None else self._path.replace(content, version)
            except FileExistsError:
                stored, version = self._read()
                if stored == record:  # the answer to the write was lost, and it was tried again
                    return record
            else:
                return record
        raise OSError(errno.EAGAIN, "other drivers write it all the time", str(self._path))


def _parse(path: Location, content: bytes) -> LeaseRecord:
    try:
        return LeaseRecord(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise RunDirectoryError(f"{path} is not a lease: {error}; delete it if no driver is running") from error
