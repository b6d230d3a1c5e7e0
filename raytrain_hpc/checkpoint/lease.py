"""The lease on a run directory: one driver at a time may publish into it. Checked before every publish."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from raytrain_hpc.background_thread import run_in_background
from raytrain_hpc.checkpoint.lease_file import LEASE_FILE, LeaseRecord, open_lease_file
from raytrain_hpc.errors import LeaseLostError, RunDirectoryError
from raytrain_hpc.storage.location import Location
from raytrain_hpc.storage.object_path import ObjectPath

_WRITE_TIMEOUT_S = 1.0  # for the number of a generation, for which the next generation waits


class Lease:
    """A driver's exclusive right to publish into `directory`, with a generation number that only increases.

    Thread-safe: renewing in the background cannot overwrite a new generation with the previous one.
    """

    def __init__(self, directory: Location, record: LeaseRecord) -> None:
        self.directory = directory
        self._record, self._file = record, open_lease_file(directory)
        self._lock = threading.Lock()  # of `_record`, which is never older than the file
        self._file_lock = threading.Lock()  # of writes

    @classmethod
    def acquire(cls, directory: Location, owner: str, *, stale_after_s: float = 15.0) -> Lease:
        """Acquire the lease on `directory` for this process, under the name `owner`. Creates the directory.

        A lease that was released, or whose process on this host has exited, is taken over at once. A lease of another
        host is taken over if it has not been renewed for `stale_after_s` seconds. Raises RunDirectoryError if another
        driver is running, or if the file cannot be read or written.
        """
        host, pid = socket.gethostname(), os.getpid()

        def take_over(previous: LeaseRecord | None) -> LeaseRecord:
            _check_not_held(directory, previous, stale_after_s)
            generation = 1 if previous is None else previous.generation + 1
            return LeaseRecord(generation, owner, host, pid, _get_start_time(pid) or 0, time.time(), released=False)

        try:
            if isinstance(directory, Path):
                directory.mkdir(parents=True, exist_ok=True)
            return cls(directory, open_lease_file(directory).update(take_over))
        except OSError as error:
            raise RunDirectoryError(f"{directory / LEASE_FILE} cannot be written: {error.strerror}") from error

    @staticmethod
    def check_available(directory: Location, *, stale_after_s: float = 15.0) -> None:
        """Raise RunDirectoryError if another driver is running in `directory`, as `acquire` does; change nothing."""
        _check_not_held(directory, open_lease_file(directory).read(), stale_after_s)

    @staticmethod
    def wait_until_available(
        directory: Location,
        print_line: Callable[[str], None],
        *,
        stale_after_s: float = 15.0,
        poll_interval_s: float = 0.5,
    ) -> None:
        """Wait until the lease of a driver on another host, which may have died, counts as abandoned.

        A driver that restarts on another host then continues its run. Prints a line before it waits. Raises
        RunDirectoryError as soon as the other driver renews its lease, and at once if it runs on this host.
        """
        file, awaited = open_lease_file(directory), None
        deadline = time.monotonic() + stale_after_s
        while (record := file.read()) is not None and _is_alive(record, stale_after_s):
            is_local, is_renewed = record.host == socket.gethostname(), awaited not in (None, record)
            if is_local or is_renewed or time.monotonic() > deadline:
                _check_not_held(directory, record, stale_after_s)
            if awaited is None:
                print_line(
                    f"waiting for the lease of {directory}: a driver ({record.host}, pid {record.pid}) renewed it "
                    f"{time.time() - record.renewed:.0f} s ago; unless it does so again, it is taken over after "
                    f"{stale_after_s:g} s"
                )
                awaited = record
            time.sleep(poll_interval_s)

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
        self._check(self._file.read())

    def _check(self, stored: LeaseRecord | None) -> None:
        """Raise as `check` does if `stored`, the content of the file, is not this driver's lease."""
        own_record = self._record
        if stored is None and isinstance(self.directory, Path) and not self.directory.is_dir():
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
        self._update(lambda record: replace(record, renewed=time.time()))

    def next_generation(self) -> int:
        """Start the next generation of ranks, whose number names its staging directories. Return its number.

        Storage that fails or does not answer within a second does not prevent it: the number is then written with the
        next renewal, and nothing is published before the file can be read again. Raises LeaseLostError.
        """
        with self._lock:
            self._record = replace(self._record, generation=self._record.generation + 1)
            generation = self._record.generation
        errors: list[LeaseLostError] = []

        def write() -> None:
            try:
                self.renew()
            except LeaseLostError as error:
                errors.append(error)
            except RunDirectoryError:
                return  # a later renewal writes it

        thread = threading.Thread(target=write, name="lease-generation", daemon=True)
        thread.start()
        thread.join(_WRITE_TIMEOUT_S)
        if errors:
            raise errors[0]
        return generation

    def release(self) -> None:
        """Release the lease. The generation number stays in the file for the next driver. Raises as `renew` does."""
        self._update(lambda record: replace(record, released=True))

    @contextlib.contextmanager
    def hold(self, on_lost: Callable[[], None], alarm: Callable[[str], None]) -> Iterator[None]:
        """Renew the lease in the background while the `with` block runs, then release it.

        `on_lost`: see `renew_in_background`. A failure to release is an `alarm`, since the run itself has ended.
        """
        try:
            with self.renew_in_background(on_lost):
                yield
        finally:
            try:
                self.release()
            except RunDirectoryError as error:  # another driver holds it, or storage fails
                alarm(str(error))

    @contextlib.contextmanager
    def renew_in_background(self, on_lost: Callable[[], None], *, interval_s: float = 5.0) -> Iterator[None]:
        """Renew the lease every `interval_s` seconds while the `with` block runs.

        If another driver takes over, `on_lost` is called once, from the renewing thread, and renewing stops.
        """

        def renew_until_done(done: threading.Event) -> None:
            while not done.wait(interval_s):
                try:
                    self.renew()
                except LeaseLostError:
                    on_lost()
                    return
                except RunDirectoryError:
                    continue  # storage failed: the next publish reports it, and drivers on this host check the pid

        with run_in_background("lease", renew_until_done):
            yield

    def _update(self, change: Callable[[LeaseRecord], LeaseRecord]) -> None:
        """Check that the lease is still held, and write the changed record."""

        def compute(stored: LeaseRecord | None) -> LeaseRecord:
            self._check(stored)
            return change(self._record)

        with self._file_lock:
            try:
                record = self._file.update(compute)
            except OSError as error:
                raise RunDirectoryError(f"{self.directory / LEASE_FILE} cannot be written: {error.strerror}") from error
            with self._lock:  # a generation may have begun meanwhile
                self._record = replace(record, generation=max(record.generation, self._record.generation))


def check_writable(directory: Location) -> None:
    """Verify that a file in `directory` can be written, synced and deleted. The directory need not exist yet.

    In an object store, also verify that a conditional write is honoured. Leaves no file or directory behind. Raises
    RunDirectoryError with the reason.
    """
    try:
        if isinstance(directory, ObjectPath):
            _probe_bucket(directory)
        else:
            _probe_directory(directory)
    except OSError as error:
        raise RunDirectoryError(
            f"run.dir={directory}: cannot be written: {error.strerror}; choose another run.dir or free it"
        ) from error


def _probe_bucket(directory: ObjectPath) -> None:
    """Write, refuse to overwrite, and delete an object. Raises OSError, or RunDirectoryError without conditions."""
    probe = directory / f".probe-{uuid.uuid4().hex}"
    with contextlib.suppress(FileExistsError):  # the answer to the first request was lost, and it was sent again
        probe.create(b"x")
    try:
        probe.create(b"y")
    except FileExistsError:
        return
    finally:
        probe.delete()
    raise RunDirectoryError(
        f"run.dir={directory}: the store ignores conditional writes (If-None-Match), so two drivers could publish at "
        "once; use a store that honours them, or a shared file system"
    )


def _probe_directory(directory: Path) -> None:
    created: list[Path] = []
    try:
        created = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # it was not created, or another process uses it already
                path.rmdir()


def _check_not_held(directory: Location, previous: LeaseRecord | None, stale_after_s: float) -> None:
    """Raise RunDirectoryError if the driver that wrote `previous` is still running."""
    if previous is not None and _is_alive(previous, stale_after_s):
        raise RunDirectoryError(
            f"run.dir={directory}: another driver ({previous.host}, pid {previous.pid}) is running in it; stop it or "
            "choose another run.dir"
        )


def _is_alive(record: LeaseRecord, stale_after_s: float) -> bool:
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
