"""Check by a worker that it can use the run directory; if it is in an object store, also how fast."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass

from raytrain_hpc.storage.location import parse_location
from raytrain_hpc.storage.object_path import ObjectPath

_PROBE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class DirectoryAccess:
    """What a worker found: `problem` is empty if it can use the directory. The speeds are 0 for a local directory."""

    problem: str
    upload_mbs: float = 0.0
    download_mbs: float = 0.0


def check_directory_access(marker_path: str, token: str) -> DirectoryAccess:
    """Read the marker file, which the driver has written with `token`; for an object store, also transfer 32 MiB."""
    path = parse_location(marker_path)
    try:
        if path.read_bytes() != token.encode():
            return DirectoryAccess("another file has its name")
        return _measure_speed(path) if isinstance(path, ObjectPath) else DirectoryAccess("")
    except OSError as error:
        return DirectoryAccess(str(error.strerror or error))


def _measure_speed(marker: ObjectPath) -> DirectoryAccess:
    """Upload and download one object. Raises OSError."""
    content = os.urandom(_PROBE_BYTES)
    path = ObjectPath(marker.scheme, marker.bucket, f"{marker.key}-{uuid.uuid4().hex}")
    start = time.perf_counter()
    try:
        path.upload([content], len(content))
        uploaded = time.perf_counter()
        path.read_bytes()
        downloaded = time.perf_counter()
    finally:
        path.delete()
    megabytes = len(content) / 1e6
    return DirectoryAccess("", megabytes / (uploaded - start), megabytes / (downloaded - uploaded))
