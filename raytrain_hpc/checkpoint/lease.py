"""Who may write into a run directory: one driver at a time, by a lease file that every publish is checked against."""

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
    """The content of the lease file. `started` is the process's start in clock ticks since boot; `renewed` is unix."""

    generation: int
    owner: str
    host: str
    pid: int
    started: int
    renewed: float
    released: bool

    def is_same_lease(self, other: _LeaseRecord) -> bool:
        """Whether this is `other`, or what is left of it from a generation before that could not be written down."""
        apart = replace(self, renewed=0.0, generation=0) != replace(other, renewed=0.0, generation=0)
        return not apart and self.generation <= other.generation


class Lease:
    """A driver's right to publish into `directory`, under a generation number that only ever grows.

    Any thread may use it: what is renewed behind a run is not to write down the generation that has just ended.
    """

    def __init__(self, directory: Path, record: _LeaseRecord) -> None:
        self.directory = directory
        self._record = record
        self._lock = threading.RLock()  # over the file and `_holder` together

    @classmethod
    def acquire(cls, directory: Path, owner: str, *, stale_after_s: float = 15.0) -> Lease:
        """Take the directory, which is created if need be, for this process under the name `owner`.

        A lease that was released, or whose process on this host is gone, is taken over at once; one of another host
        when it was not renewed for `stale_after` seconds. Raises RunDirectoryError where another driver is at work,
        and where the file cannot be read or written.
        """
        directory = Path(directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _lock_directory(directory):
                before = _read_previous(directory, stale_after_s)
                generation = 1 if before is None else before.generation + 1
                host, pid = socket.gethostname(), os.getpid()
                holder = _LeaseRecord(
                    generation, owner, host, pid, _get_start_time(pid) or 0, time.time(), released=False
                )
                _write(directory, holder)
        except OSError as error:
            raise RunDirectoryError(f"{directory / LEASE_FILE} cannot be written: {error.strerror}") from error
        return cls(directory, holder)

    @staticmethod
    def check_available(directory: Path, *, stale_after_s: float = 15.0) -> None:
        """Raises as `acquire` where another driver is at work; changes nothing."""
        _read_previous(Path(directory), stale_after_s)

    @property
    def generation(self) -> int:
        """The number under which this driver's ranks work now."""
        return self._record.generation

    @property
    def owner(self) -> str:
        """The name given to `acquire`."""
        return self._record.owner

    def check(self) -> None:
        """Raises LeaseLost where the file names another owner or a later generation, or is gone, and RunDirectoryError
        where that cannot be known: the whole directory is gone, or cannot be read."""
        with self._lock:
            found, held = _read(self.directory), self._record
        if found is None and not self.directory.is_dir():
            raise RunDirectoryError(f"{self.directory} is gone")
        if found is None:
            raise LeaseLostError(f"{self.directory / LEASE_FILE} is gone; this driver stops publishing")
        if not found.is_same_lease(held):
            raise LeaseLostError(
                f"{self.directory} was taken over by {found.owner} ({found.host}, pid {found.pid}, generation "
                f"{found.generation}); this driver, {held.owner} of generation {held.generation}, stops publishing"
            )

    def renew(self) -> None:
        """Show drivers on other hosts that this one lives. Raises LeaseLost, and RunDirectoryError on a full disk."""
        with self._lock:
            self._update(replace(self._record, renewed=time.time()))

    def next_generation(self) -> int:
        """Start a new generation in the same driver; ranks of the former one are fenced. Raises LeaseLost.

        A storage that refuses is no reason not to: nothing is published before it can be read again.
        """
        with self._lock:
            following = replace(self._record, generation=self.generation + 1, renewed=time.time())
            try:
                self._update(following)
            except LeaseLostError:
                raise
            except RunDirectoryError:
                self._record = following
            return following.generation

    def release(self) -> None:
        """Let go. The generation number stays in the file, so that the next driver counts on. Raises as `renew`."""
        with self._lock:
            self._update(replace(self._record, released=True))

    @contextlib.contextmanager
    def renew_in_background(self, on_lost: Callable[[], None], *, interval_s: float = 5.0) -> Iterator[None]:
        """Renew behind what runs inside; `on_lost` is called once where another driver has taken over."""
        done = threading.Event()

        def keep() -> None:
            while not done.wait(interval_s):
                try:
                    self.renew()
                except LeaseLostError:
                    on_lost()
                    return
                except RunDirectoryError:
                    continue  # a full disk: the next publish raises the alarm, and drivers on this host see the pid

        thread = threading.Thread(target=keep, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _update(self, record: _LeaseRecord) -> None:
        try:
            with _lock_directory(self.directory):
                self.check()
                _write(self.directory, record)
        except OSError as error:
            raise RunDirectoryError(f"{self.directory / LEASE_FILE} cannot be written: {error.strerror}") from error
        self._record = record


def check_writable(directory: Path) -> None:
    """Prove that a file in the directory, which need not exist yet, can be written, synced and deleted.

    Leaves nothing behind, no directory either. Raises RunDirectoryError with the system's reason where it cannot.
    """
    made: list[Path] = []
    try:
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunDirectoryError(
            f"run.dir {directory} cannot be written: {error.strerror}; choose another run.dir or free it"
        ) from error
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # it was not made, or somebody else uses it already
                path.rmdir()


@contextlib.contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """One reader-then-writer at a time. A file system without locks is used without: only the race stays open."""
    with (directory / f".{LEASE_FILE}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
        yield


def _read_previous(directory: Path, stale_after_s: float) -> _LeaseRecord | None:
    """The last holder, who is gone; None where there was none. Raises RunDirectoryError where it is at work."""
    before = _read(directory)
    if before is not None and _is_alive(before, stale_after_s):
        raise RunDirectoryError(
            f"run.dir {directory}: another driver ({before.host}, pid {before.pid}) is running in it; stop it or "
            "choose another run.dir"
        )
    return before


def _read(directory: Path) -> _LeaseRecord | None:
    """The lease file; None where there is none. Raises RunDirectoryError where it is not a lease."""
    path = directory / LEASE_FILE
    try:
        return _LeaseRecord(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise RunDirectoryError(f"{path} is no lease; delete it if no driver is running: {error}") from error


def _write(directory: Path, record: _LeaseRecord) -> None:
    """Replace the lease file in one step, so that no reader ever sees half of it."""
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
    if record.released:
        return False
    if record.host == socket.gethostname():
        return _get_start_time(record.pid) == record.started
    return time.time() - record.renewed < stale_after_s


def _get_start_time(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since boot; None where it is gone or a zombie.

    With the pid it names a process for good: pids come back, start times do not.
    """
    stat = Path(f"/proc/{pid}/stat")
    try:
        status = stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None if stat.parent.parent.is_dir() else _get_start_time_without_proc(pid)
    # The second field, the name, may itself hold blanks and brackets: count from its last bracket.
    fields = status.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _get_start_time_without_proc(pid: int) -> int | None:
    """Systems without /proc tell only whether the pid is in use: 0 stands for any start."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0
