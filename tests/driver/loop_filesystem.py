"""A file system of its own that can be full, fail, or say nothing, and be well again. Needs root and loop devices."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: from then on every access fails, of open files too
_BYTES = 64 << 20


class NoDisk(Exception):
    """This machine lets us mount none."""


@dataclass(frozen=True)
class Disk:
    """Mounted at `path`, kept in the file `image`."""

    path: Path
    image: Path

    def fill(self) -> None:
        """Leave no room."""
        with contextlib.suppress(OSError), (self.path / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    def free(self) -> None:
        (self.path / "ballast").unlink()

    def fail(self) -> None:
        """Every access is an error from now on."""
        descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", 0))
        os.close(descriptor)

    def mend(self) -> None:
        """Mounted anew: files that were open stay dead."""
        _run("umount", str(self.path))
        _run("mount", "-o", "loop", str(self.image), str(self.path))

    def freeze(self, seconds: float) -> None:
        """Whoever writes waits. A process of its own thaws it: a frozen one would hold whoever is ended for good."""
        _run("fsfreeze", "-f", str(self.path))
        thaw = 'sleep "$1"; fsfreeze -u "$2"'
        subprocess.Popen(["sh", "-c", thaw, "thaw", str(seconds), str(self.path)], start_new_session=True)


@contextlib.contextmanager
def mounted(path: Path) -> Iterator[Disk]:
    """A disk at `path`, which is made, until the context is left. Raises NoDisk where none may be mounted."""
    path.mkdir(parents=True)
    disk = Disk(path, path.with_suffix(".image"))
    with disk.image.open("wb") as file:
        file.truncate(_BYTES)
    try:
        _run("mkfs.ext4", "-q", "-m", "0", str(disk.image))
        _run("mount", "-o", "loop", str(disk.image), str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoDisk(str(error)) from error
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
