"""Locations of run directories: a local path, or a URL of an object store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from raytrain_hpc.storage.object_path import ObjectPath

Location = Path | ObjectPath


def is_url(location: str | Path) -> bool:
    """Return whether a location is a URL rather than a local path."""
    return isinstance(location, str) and "://" in location


def parse_location(location: str | Path) -> Location:
    """Return the path, or the object path, that a run directory's name stands for.

    Raises ValueError for a bad URL, and for the home directory of a user that does not exist (~NAME).
    """
    if is_url(location):
        return ObjectPath.from_url(str(location))
    try:
        return Path(location).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{Path(location).parts[0]} is no user with a home directory here") from error


def make_absolute(location: str) -> str:
    """Return a path as an absolute one, for processes with another working directory, and a URL as it is."""
    return location if is_url(location) else str(Path(location).expanduser().absolute())


def get_size(location: Location) -> int:
    """Return the size of a file in bytes. Raises OSError; FileNotFoundError if there is none."""
    return location.get_size() if isinstance(location, ObjectPath) else location.stat().st_size


def read_chunks(location: Location, size: int, chunk_bytes: int) -> Iterator[memoryview | bytes]:
    """Yield the content of a file of `size` bytes in pieces of at most `chunk_bytes`. Raises OSError."""
    if isinstance(location, ObjectPath):
        for start in range(0, size, chunk_bytes):
            yield location.read_range(start, min(size, start + chunk_bytes))
        return
    with location.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            yield chunk


def write_atomically(location: Location, content: bytes) -> None:
    """Write a small file such that readers see the earlier or the new content. Raises OSError."""
    if isinstance(location, ObjectPath):
        location.write_bytes(content)
        return
    temporary = location.with_name(f".{location.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(location)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def create_file(location: Location, content: bytes) -> None:
    """Write a small file that does not exist yet. Raises FileExistsError if it does, also if it was just created."""
    if isinstance(location, ObjectPath):
        location.create(content)
        return
    location.parent.mkdir(parents=True, exist_ok=True)
    with location.open("xb") as file:
        file.write(content)


def list_directory_names(location: Location) -> list[str]:
    """Return the names of the directories in a directory; none if it does not exist. Raises OSError.

    In an object store, a directory exists if there is an object below it that is not empty: see
    `ObjectPath.list_directory`.
    """
    if isinstance(location, ObjectPath):
        start = len(location.key) + 1 if location.key else 0
        parts = (info.path.key[start:].partition("/") for info in location.list_recursively() if info.bytes)
        return sorted({name for name, separator, _ in parts if separator})
    return sorted(path.name for path in location.iterdir() if path.is_dir()) if location.is_dir() else []


def get_modified_time(location: Location) -> float:
    """Return the Unix time of the last change of a file. Raises OSError."""
    return location.get_modified_time() if isinstance(location, ObjectPath) else location.stat().st_mtime
