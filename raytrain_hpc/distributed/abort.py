"""Aborting this rank's collectives from another thread, when a peer neither takes part nor is seen to have exited.

gloo waits for a stopped or unreachable peer until its timeout and has no function to abort; NCCL waits for any lost
peer. The end of a process closes its connections, which frees its peers one after another. Aborting does the same.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # getaddrinfo would import it, within a generation
import os
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from raytrain_hpc.distributed.peer_links import PeerSocket, read_socket_name, shut_down
from raytrain_hpc.torch_private_groups import abort_accelerator_groups

Endpoint = tuple[str, int]  # address and port
_NO_RANK = -1


class Connection(NamedTuple):
    """A TCP connection of this process. `name`: the kernel's name of the socket, unique while it is open."""

    descriptor: int
    name: str
    local_endpoint: Endpoint
    remote_endpoint: Endpoint


class CollectiveAbort:
    """A callable that aborts all collectives of this rank in one generation. `is_aborted`: whether it has done so."""

    def __init__(self, sockets: Mapping[int, PeerSocket], store: Endpoint | None = None):
        """Arm the abort. `sockets`: to other ranks, by descriptor, from `find_peer_sockets`.

        `store`: host and port of the store through which groups are being created. Connections to it are shut down too:
        a rank waits there for the address of one that is lost.
        """
        self._lock = threading.Lock()
        self._is_disarmed, self.is_aborted = False, False
        self.sockets, self._store_endpoints = sockets, set[Endpoint]()
        if store is not None:
            found = socket.getaddrinfo(*store, type=socket.SOCK_STREAM)
            self._store_endpoints = {_to_endpoint(endpoint) for *_, endpoint in found}

    def __call__(self) -> None:
        """Abort: collectives in progress on this rank raise an error. Callable from any thread; no-op if disarmed."""
        with self._lock:
            if self._is_disarmed:
                return
            self.is_aborted = True
            shut_down(self.sockets)
            if self._store_endpoints:
                connections = (c for c in list_connections() if c.remote_endpoint in self._store_endpoints)
                shut_down({c.descriptor: PeerSocket(c.name, _NO_RANK) for c in connections})
            abort_accelerator_groups()

    def disarm(self) -> None:
        """Disable the abort. Call before the groups are destroyed: their descriptors may then become other files."""
        with self._lock:
            self._is_disarmed = True


def find_peer_sockets(
    own_connections: Sequence[Connection], endpoints: Sequence[Collection[Endpoint]], rank: int
) -> dict[int, PeerSocket]:
    """Return the sockets to other ranks among all connections of this process, by descriptor.

    `endpoints`: the local endpoints of each rank, by rank. A socket belongs to a process group if its remote endpoint
    is a local one of another rank; connections to the store or to Ray are left out.
    """
    ranks = {endpoint: peer_rank for peer_rank, peer in enumerate(endpoints) if peer_rank != rank for endpoint in peer}
    return {
        connection.descriptor: PeerSocket(connection.name, ranks[connection.remote_endpoint])
        for connection in own_connections
        if connection.remote_endpoint in ranks
    }


def list_connections() -> list[Connection]:
    """Return all TCP connections of this process."""
    connections = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        name = read_socket_name(descriptor)
        if not name.startswith("socket:"):
            continue
        # OSError: not connected, or closed meanwhile.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                connections.append(
                    Connection(
                        descriptor,
                        name,
                        _to_endpoint(duplicate.getsockname()),
                        _to_endpoint(duplicate.getpeername()),
                    )
                )
    return connections


def _to_endpoint(address: Any) -> Endpoint:
    """Return (address, port), with an IPv4-mapped IPv6 address as IPv4, so that both sides have the same form."""
    return address[0].removeprefix("::ffff:"), address[1]
