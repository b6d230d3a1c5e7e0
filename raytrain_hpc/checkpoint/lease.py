"""The lease on a run directory: one driver at a time may publish into it. Checked before every publish."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raytrain_hpc.errors import LeaseLostError, RunDirectoryError

LEASE_FILE = "lease.json"


@dataclass(frozen=True)
class _LeaseRecord:
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

    def is_same_lease(self, other: _LeaseRecord) -> bool:
        """Return whether this is the record of `other`'s lease, of the same or an earlier generation.

        The file has an earlier generation if storage failed when the current one began.
        """
        differs = replace(self, renewed=0.0, generation=0) != replace(other, renewed=0.0, generation=0)
        return not differs and self.generation <= other.generation


class Lease:
    """A driver's exclusive right to publish into `directory`, with a generation number that only increases.

    Thread-safe: renewing in the background cannot overwrite a new generation with the previous one.
    """

    def __init__(self, directory: Path, record: _LeaseRecord) -> None:
        self.directory = directory
        self._record = record
        self._lock = threading.RLock()  # protects the file and `_record` together

    @classmethod
    def acquire(cls, directory: Path, owner: str, *, stale_after_s: float = 15.0) -> Lease:
        """Acquire the lease on `directory` for this process, under the name `owner`. Creates the directory.

        A lease that was released, or whose process on this host has exited, is taken over at once. A lease of another
        host is taken over if it has not been renewed for `stale_after_s` seconds. Raises RunDirectoryError if another
        driver is running, or if the file cannot be read or written.
        """
        directory = Path(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _lock_directory(directory):
                previous = _read_previous(directory, stale_after_s)
                generation = 1 if previous is None else previous.generation + 1
                host, pid = socket.gethostname(), os.getpid()
                record = _LeaseRecord(
                    generation, owner, host, pid, _get_start_time(pid) or 0, time.time(), released=False
                )
                _write(directory, record)
        except OSError as error:
            raise RunDirectoryError(f"{directory / LEASE_FILE} cannot be written: {error.strerror}") from error
        return cls(directory, record)

    @staticmethod
    def check_available(directory: Path, *, stale_after_s: float = 15.0) -> None:
        """Raise RunDirectoryError if another driver is running in `directory`, as `acquire` does; change nothing."""
        _read_previous(Path(directory), stale_after_s)

    @property
    def generation(self) -> int:
        """Number of the current generation of ranks."""
        return self._record.generation

    @property
    def owner(self) -> str:
        """The name given to `acquire`."""
        return self._record.owner

    def check(self) -> None:
        """Verify that this driver still holds the lease. Call right before publishing.

        Raises LeaseLostError if the file is gone or names another owner or a later generation. Raises RunDirectoryError
        if that is unknown because the directory is gone or cannot be read.
        """
        with self._lock:
            stored, own_record = _read(self.directory), self._record
        if stored is None and not self.directory.is_dir():
            raise RunDirectoryError(f"{self.directory} is gone")
        if stored is None:
            raise LeaseLostError(f"{self.directory / LEASE_FILE} is gone; this driver stops publishing")
        if not stored.is_same_lease(own_record):
            raise LeaseLostError(
                f"{self.directory} was taken over by {stored.owner} ({stored.host}, pid {stored.pid}, generation "
                f"{stored.generation}); this driver, {own_record.owner} of generation {own_record.generation}, stops "
                "publishing"
            )

    def renew(self) -> None:
        """Renew the lease, so that drivers on other hosts see that this one is alive.

        Raises LeaseLostError as `check` does, and RunDirectoryError if the file cannot be written.
        """
        with self._lock:
            self._update(replace(self._record, renewed=time.time()))

    def next_generation(self) -> int:
        """Start the next generation of ranks, whose number names its staging directories. Return its number.

        A storage failure does not prevent it: nothing is published before the file can be read again. Raises
        LeaseLostError.
        """
        with self._lock:
            record = replace(self._record, generation=self.generation + 1, renewed=time.time())
            try:
                self._update(record)
            except LeaseLostError:
                raise
            except RunDirectoryError:
                self._record = record
            return record.generation

    def release(self) -> None:
        """Release the lease. The generation number stays in the file for the next driver. Raises as `renew` does."""
        with self._lock:
            self._update(replace(self._record, released=True))

    @contextlib.contextmanager
    def renew_in_background(self, on_lost: Callable[[], None], *, interval_s: float = 5.0) -> Iterator[None]:
        """Renew the lease every `interval_s` seconds while the `with` block runs.

        If another driver takes over, `on_lost` is called once, from the renewing thread, and renewing stops.
        """
        done = threading.Event()

        def renew_until_done() -> None:
            while not done.wait(interval_s):
                try:
                    self.renew()
                except LeaseLostError:
                    on_lost()
                    return
                except RunDirectoryError:
                    continue  # storage failed: the next publish reports it, and drivers on this host check the pid

        thread = threading.Thread(target=renew_until_done, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _update(self, record: _LeaseRecord) -> None:
        """Check that the lease is still held, then write `record` in its place."""
        try:
            with _lock_directory(self.directory):
                self.check()
                _write(self.directory, record)
        except OSError as error:
            raise RunDirectoryError(f"{self.directory / LEASE_FILE} cannot be written: {error.strerror}") from error
        self._record = record


def check_writable(directory: Path) -> None:
    """Verify that a file in `directory` can be written, synced and deleted. The directory need not exist yet.

    Leaves no file or directory behind. Raises RunDirectoryError with the system's reason.
    """
    created: list[Path] = []
    try:
        created = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunDirectoryError(
            f"run.dir={directory}: cannot be written: {error.strerror}; choose another run.dir or free it"
        ) from error
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # it was not created, or another process uses it already
                path.rmdir()


@contextlib.contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """Hold an exclusive file lock while the lease file is read and written.

    On a file system without locks no lock is taken: two drivers that start at the same instant may then both proceed.
    """
    with (directory / f".{LEASE_FILE}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
        yield


def _read_previous(directory: Path, stale_after_s: float) -> _LeaseRecord | None:
    """Return the record of the last driver, which has exited; None if there was none.

    Raises RunDirectoryError if that driver is still running.
    """
    previous = _read(directory)
    if previous is not None and _is_alive(previous, stale_after_s):
        raise RunDirectoryError(
            f"run.dir={directory}: another driver ({previous.host}, pid {previous.pid}) is running in it; stop it or "
            "choose another run.dir"
        )
    return previous


def _read(directory: Path) -> _LeaseRecord | None:
    """Return the content of the lease file; None if there is none. Raises RunDirectoryError if it is unreadable."""
    path = directory / LEASE_FILE
    try:
        return _LeaseRecord(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise RunDirectoryError(f"{path} is not a lease: {error}; delete it if no driver is running") from error


def _write(directory: Path, record: _LeaseRecord) -> None:
    """Replace the lease file atomically, so that a reader never sees a partial one."""
    temporary = directory / f".{LEASE_FILE}.{record.pid}"
    try:
        with temporary.open("w") as file:
            json.dump(asdict(record), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / LEASE_FILE)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _is_alive(record: _LeaseRecord, stale_after_s: float) -> bool:
    """Return whether the holder counts as running: by its process on this host, by its last renewal on another."""
    if record.released:
        return False
    if record.host == socket.gethostname():
        return _get_start_time(record.pid) == record.started
    return time.time() - record.renewed < stale_after_s


def _get_start_time(pid: int) -> int | None:
    """Return the start time of a process on this host, in clock ticks since boot; None if it has exited or is a zombie.

    Pids are reused; pid and start time together identify a process.
    """
    stat = Path(f"/proc/{pid}/stat")
    try:
        status = stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None if stat.parent.parent.is_dir() else _get_start_time_without_proc(pid)
    # The second field, the process name, may contain blanks and brackets: split after its last bracket.
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _get_start_time_without_proc(pid: int) -> int | None:
    """Return 0, for an unknown start time, if the pid is in use, else None. For systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0
