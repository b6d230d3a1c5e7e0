"""Breaks this rank's collectives from another thread, where a peer is neither there nor seen to be gone.

gloo waits for a peer that is stopped, or beyond a cut network, until its timeout, and has no call to end that; NCCL
waits for any peer that is gone. A process's end closes its connections, and so does this, one after another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raytrain_hpc.worker.groups import Place

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


class Abort:
    """What there is to break in one generation. Made by all ranks together, when all groups have been."""

    def __init__(self, place: Place):
        """Collective."""
        self._lock = threading.Lock()
        self._over, self.called = False, False
        self._connections: dict[int, str] = {}  # descriptor -> name of the socket there
        if place.world_group is not None and place.device.type != "cuda":
            self._connections = _between_ranks(place)

    def __call__(self) -> None:
        """Have what waits in a collective of this rank go on with an error. Any thread's; nothing once it is over."""
        with self._lock:
            if self._over:
                return
            self.called = True
            for descriptor, name in self._connections.items():
                _shut_down(descriptor, name)
            _abort_nccl()

    def end(self) -> None:
        """The groups are being given up: their descriptors may become other files."""
        with self._lock:
            self._over = True


def _between_ranks(place: Place) -> dict[int, str]:
    """The sockets whose other end is one of another rank's: of all that a process has, those of its groups."""
    mine = _connected()
    gathered: list[Any] = [None] * place.layout.world
    dist.all_gather_object(gathered, [here for _, _, here, _ in mine])
    ranks = {here for rank, ends in enumerate(gathered) if rank != place.rank for here in ends}
    return {descriptor: name for descriptor, name, _, there in mine if there in ranks}


def _connected() -> list[tuple[int, str, str, str]]:
    """(descriptor, name, local end, remote end) of every TCP connection of this process."""
    ends = {}
    for table in map(Path, _TABLES):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, here, there, _, _, _, _, _, _, inode, *_ = line.split()
            ends[f"socket:[{inode}]"] = here, there
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        name = _name(descriptor)
        if name in ends:
            found.append((descriptor, name, *ends[name]))
    return found


def _name(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # closed meanwhile
        return ""


def _shut_down(descriptor: int, name: str) -> None:
    with contextlib.suppress(OSError):  # closed, or never connected any more
        own = os.dup(descriptor)
        with socket.socket(fileno=own) as connection:
            if _name(own) == name:
                connection.shutdown(socket.SHUT_RDWR)


def _abort_nccl() -> None:
    """Of all groups at once: their kernels end, with tensors that nobody may read."""
    if not dist.is_initialized():
        return
    groups = [group for group, (backend, _) in dist.distributed_c10d._world.pg_map.items() if backend == "nccl"]
    if groups:
        backend: Any = groups[0]._get_backend(torch.device("cuda"))
        backend._group_start()  # one by one they can wait for each other (pytorch issue 119797)
        for group in groups:
            group.abort()
        backend._group_end()
