"""A file system that can be full, fail, or freeze, and recover. Needs root and loop devices."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: every later access fails, also to open files
_BYTES = 64 << 20


class DiskUnavailableError(Exception):
    """This machine does not permit mounting a file system."""


@dataclass(frozen=True)
class Disk:
    """A file system in the file `image`, mounted at `path`."""

    path: Path
    image: Path

    def fill(self) -> None:
        """Fill all free space."""
        with contextlib.suppress(OSError), (self.path / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    def free(self) -> None:
        (self.path / "ballast").unlink()

    def fail(self) -> None:
        """Make every further access fail."""
        descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", 0))
        os.close(descriptor)

    def repair(self) -> None:
        """Mount the file system again. Files that were open stay unusable."""
        _run("umount", str(self.path))
        _run("mount", "-o", "loop", str(self.image), str(self.path))

    def freeze(self, seconds: float) -> None:
        """Block all writers for `seconds`. A separate process thaws: one that a freeze blocks could not."""
        _run("fsfreeze", "-f", str(self.path))
        thaw = 'sleep "$1"; fsfreeze -u "$2"'
        subprocess.Popen(["sh", "-c", thaw, "thaw", str(seconds), str(self.path)], start_new_session=True)


@contextlib.contextmanager
def mount_disk(path: Path) -> Iterator[Disk]:
    """Mount a disk at the new directory `path` within the context; DiskUnavailableError if that is not permitted."""
    path.mkdir(parents=True)
    disk = Disk(path, path.with_suffix(".image"))
    with disk.image.open("wb") as file:
        file.truncate(_BYTES)
    try:
        _run("mkfs.ext4", "-q", "-m", "0", str(disk.image))
        _run("mount", "-o", "loop", str(disk.image), str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        raise DiskUnavailableError(str(error)) from error
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
