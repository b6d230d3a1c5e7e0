"""Upload of a shard file from node-local storage to the run directory, in a background thread."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

from raytrain_hpc.checkpoint.checksum import ChecksumBuilder, FileChecksum
from raytrain_hpc.checkpoint.manifest import ShardReport
from raytrain_hpc.checkpoint.safetensors_writer import write_chunks
from raytrain_hpc.storage.location import Location

_CHUNK_BYTES = 4 * 2**20


class ShardUploader:
    """Uploader of one rank's shard files, one at a time. Host memory holds a few chunks of a file, not all of it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, file: BinaryIO, report: ShardReport, destination: Location, on_end: Callable[[str], None]) -> None:
        """Upload `file`, which is closed then, to `destination`. A previous upload is waited for first.

        The file stays readable when it is deleted meanwhile. `on_end` is called once, from the uploading thread, with
        the problem, or "" if there was none.
        """
        self.finish()
        arguments = (file, report, destination, on_end)
        self._thread = threading.Thread(target=_upload, args=arguments, name="checkpoint-uploader", daemon=True)
        self._thread.start()

    def finish(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the upload in progress. Return whether it has finished."""
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True


def _upload(file: BinaryIO, report: ShardReport, destination: Location, on_end: Callable[[str], None]) -> None:
    try:
        with file:
            copy_file(file, report.checksum, destination)
    except OSError as error:
        on_end(f"{destination} cannot be written: {error.strerror or error}")
    except Exception as error:  # a defect: it must not end the thread in silence
        on_end(f"{destination} cannot be written: {error!r}")
    else:
        on_end("")


def copy_file(file: BinaryIO, expected: FileChecksum, destination: Location) -> None:
    """Copy a shard file, synced or uploaded, and verify what was read.

    Raises OSError if reading or writing fails, or if the file does not match its checksum.
    """
    checksum = ChecksumBuilder(expected.algorithm)
    write_chunks(destination, _read_chunks(file, checksum, expected), expected.bytes)


def _read_chunks(file: BinaryIO, checksum: ChecksumBuilder, expected: FileChecksum) -> Iterator[bytes]:
    """Yield the content of a file. Raises OSError at its end if it does not match: the copy is then not completed."""
    while chunk := file.read(_CHUNK_BYTES):
        checksum.update(chunk)
        yield chunk
    if checksum.finish() != expected:
        raise OSError(errno.EIO, f"{file.name} was changed after it was written")
