"""Breaks this rank's collectives from another thread, where a peer is neither there nor seen to be gone.

gloo waits for a peer that is stopped, or beyond a cut network, until its timeout, and has no call to end that; NCCL
waits for any peer that is gone. A process's end closes its connections, and so does this, one after another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Endpoint = tuple[str, int]  # address and port


class Connection(NamedTuple):
    """A TCP connection of this process. `name`: of the socket, which no other has while it is open."""

    descriptor: int
    name: str
    local_endpoint: Endpoint
    remote_endpoint: Endpoint


class CollectiveAbort:
    """What there is to break in one generation."""

    def __init__(self, sockets: Mapping[int, str]):
        """`sockets`: those to other ranks, descriptor -> name."""
        self._lock = threading.Lock()
        self._is_disarmed, self.is_aborted = False, False
        self._sockets = sockets

    def __call__(self) -> None:
        """Have what waits in a collective of this rank go on with an error. Any thread's; nothing once it is over."""
        with self._lock:
            if self._is_disarmed:
                return
            self.is_aborted = True
            for descriptor, name in self._sockets.items():
                _shut_down(descriptor, name)
            _abort_nccl()

    def disarm(self) -> None:
        """The groups are being given up: their descriptors may become other files."""
        with self._lock:
            self._is_disarmed = True


def find_peer_sockets(
    own_connections: Sequence[Connection], endpoints: Sequence[Collection[Endpoint]], rank: int
) -> dict[int, str]:
    """Of all connections that a process has, those of its groups: whose other end is one of another rank's `ends`.

    Descriptor -> name.
    """
    others = {end for other, theirs in enumerate(endpoints) if other != rank for end in theirs}
    return {one.descriptor: one.name for one in own_connections if one.remote_endpoint in others}


def list_connections() -> list[Connection]:
    """Every TCP connection of this process."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        name = _read_socket_name(descriptor)
        if not name.startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:  # not connected, or gone
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                found.append(
                    Connection(descriptor, name, _to_endpoint(one.getsockname()), _to_endpoint(one.getpeername()))
                )
    return found


def _to_endpoint(address: Any) -> Endpoint:
    """An end of a connection, the same from both sides: IPv4 may be dressed as IPv6."""
    return address[0].removeprefix("::ffff:"), address[1]


def _read_socket_name(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # closed meanwhile
        return ""


def _shut_down(descriptor: int, name: str) -> None:
    with contextlib.suppress(OSError):  # closed, or never connected any more
        own = os.dup(descriptor)
        with socket.socket(fileno=own) as connection:
            if _read_socket_name(own) == name:
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
