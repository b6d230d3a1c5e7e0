"""Ray's temporary directory, in which it creates sockets. Their paths are checked before Ray is started."""

from __future__ import annotations

import os
from pathlib import Path

from raytrain_hpc.errors import ClusterError

MAX_SOCKET_PATH_BYTES = 107  # of an AF_UNIX address on Linux, without the final NUL


def get_socket_path() -> Path:
    """Return the longest socket path of a Ray that this process starts now; only the time in it can differ."""
    return get_ray_temp_dir() / f"session_2026-01-01_00-00-00_000000_{os.getpid()}" / "sockets" / "plasma_store"


def check_socket_path() -> None:
    """Raise ClusterError if Ray's socket paths would be too long. Call before Ray is started on this machine."""
    name, directory = _find_temp_dir()
    length = len(os.fsencode(get_socket_path()))
    if length > MAX_SOCKET_PATH_BYTES:
        raise ClusterError(
            f"{name}={directory}: Ray's socket paths in it would have {length} bytes, at most {MAX_SOCKET_PATH_BYTES} "
            "are possible; set RAY_TMPDIR to a local directory with a shorter path, such as /tmp"
        )


def get_ray_temp_dir() -> Path:
    """Return the directory in which a Ray that is started now keeps its sessions and logs."""
    return Path(_find_temp_dir()[1]) / "ray"


def _find_temp_dir() -> tuple[str, str]:
    """Return the variable that determines Ray's temporary directory, and the directory, as Ray does."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if name in os.environ:
            return name, os.environ[name]
    return "RAY_TMPDIR", "/tmp"
