"""Dataset locations: a local directory, or a folder of an object store read through pyarrow's file systems."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs

from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import NO_RETRY, ReadRetry, is_transient

MAX_CONCURRENT_REQUESTS = 16  # to an object store, per read
T = TypeVar("T")


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
        """File system and path of the folder in it.

        Raises DataError if the URI is invalid, and OSError if the store cannot be reached, which some URIs need.
        """
        try:
            system, path = pa.fs.FileSystem.from_uri(self.uri)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, OSError) and is_transient(error):
                raise
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
        """Open for random-access reads. Raises OSError."""
        system, folder = self.folder.filesystem_and_path
        return system.open_input_file(f"{folder}/{self.name}")

    def call(self, method: Callable[[], T], retry: ReadRetry) -> T:
        """Return the result of a method that reads the file. Raises DataError if it cannot be read."""
        with self.translate_errors():
            return retry(method, self)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Convert storage errors raised inside the context to a DataError that names the file."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self}: cannot be read ({_format_error(error)})") from error

    def read(self, retry: ReadRetry) -> bytes:
        """Read the whole file."""
        return self.call(self._read, retry)

    def _read(self) -> bytes:
        with self.open() as file:
            return bytes(file.read())

    def get_size(self, retry: ReadRetry) -> int | None:
        """Return the size in bytes, or None if the file does not exist."""
        info = self.call(self._get_info, retry)
        return int(info.size) if info.is_file else None

    def _get_info(self) -> Any:
        system, folder = self.folder.filesystem_and_path
        return system.get_file_info(f"{folder}/{self.name}")


Location = Path | RemoteFolder


def parse_location(path: Path | str) -> Location:
    """Convert a configured path or URI to a location."""
    return RemoteFolder(str(path)) if is_remote(path) else Path(path).expanduser()


def read_local(read: Callable[[], T], file: Path, retry: ReadRetry) -> T:
    """Return the result of `read`, which reads a local file. Raises DataError if that cannot be read."""
    try:
        return retry(read, file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def get_file_size(file: Path | RemoteFile, retry: ReadRetry = NO_RETRY) -> int | None:
    """Return the size of a file in bytes, or None if it does not exist. Raises DataError if storage fails."""
    if isinstance(file, RemoteFile):
        return file.get_size(retry)
    return read_local(partial(_get_local_size, file), file, retry)


def get_file_sizes(files: Sequence[Path | RemoteFile], retry: ReadRetry = NO_RETRY) -> list[int | None]:
    """Return the results of `get_file_size`. Requests to a store are sent concurrently, since latency dominates."""
    get_size = partial(get_file_size, retry=retry)
    if not any(isinstance(file, RemoteFile) for file in files):
        return list(map(get_size, files))
    with ThreadPoolExecutor(min(MAX_CONCURRENT_REQUESTS, len(files))) as pool:
        return list(pool.map(get_size, files))


def _get_local_size(file: Path) -> int | None:
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _format_error(error: BaseException) -> str:
    return " ".join(str(error).split())
