"""Dataset locations: a local directory, or a folder of an object store read through pyarrow's file systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs

from raytrain_hpc.errors import DataError


def is_remote(path: Path | str) -> bool:
    """Return whether a dataset path is a URI (s3://, gs://, hdfs://, ...) rather than a local directory."""
    return isinstance(path, str) and "://" in path


@dataclass(frozen=True)
class RemoteFolder:
    """Remote folder named by a URI. File-system options (endpoint_override, region, ...) are in the URI's query.

    Picklable: each process opens its own connection.
    """

    uri: str

    def __str__(self) -> str:
        scheme, _, rest = self.uri.partition("?")[0].partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"  # without credentials: for error messages

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(self, name)

    @cached_property
    def filesystem_and_path(self) -> tuple[Any, str]:
        """File system and path of the folder in it. Raises DataError if the URI is invalid."""
        try:
            system, path = pa.fs.FileSystem.from_uri(self.uri)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{self}: not a readable location ({_format_error(error)}); see docs/data.md") from error
        return system, path.rstrip("/")


@dataclass(frozen=True)
class RemoteFile:
    """File in a remote folder."""

    folder: RemoteFolder
    name: str

    def __str__(self) -> str:
        return f"{str(self.folder).rstrip('/')}/{self.name}"

    def open(self) -> Any:
        """Open for random-access reads. Raises DataError if the file cannot be opened."""
        system, folder = self.folder.filesystem_and_path
        with self.translate_errors():
            return system.open_input_file(f"{folder}/{self.name}")

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Convert storage errors raised inside the context to a DataError that names the file."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self}: cannot be read ({_format_error(error)})") from error

    def read(self) -> bytes:
        """Read the whole file."""
        with self.translate_errors(), self.open() as file:
            return bytes(file.read())

    def get_size(self) -> int | None:
        """Return the size in bytes, or None if the file does not exist."""
        system, folder = self.folder.filesystem_and_path
        with self.translate_errors():
            info = system.get_file_info(f"{folder}/{self.name}")
        return int(info.size) if info.is_file else None


Location = Path | RemoteFolder


def parse_location(path: Path | str) -> Location:
    """Convert a configured path or URI to a location."""
    return RemoteFolder(str(path)) if is_remote(path) else Path(path).expanduser()


def get_file_size(file: Path | RemoteFile) -> int | None:
    """Return the size of a file in bytes, or None if it does not exist."""
    if isinstance(file, RemoteFile):
        return file.get_size()
    return file.stat().st_size if file.is_file() else None


def _format_error(error: BaseException) -> str:
    return " ".join(str(error).split())
