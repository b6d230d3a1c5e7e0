"""The TCP connections of a rank to other ranks, and whether their packets arrive.

A process that is frozen or killed acknowledges what it receives, or refuses it: its kernel does. Only a link that is
down acknowledges nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_TCP_INFO_BYTES, _RETRANSMITS = 8, 2  # the beginning of tcp_info, and the offset of tcpi_retransmits in it
_SO_ATTACH_FILTER = 26
_RETURN = struct.pack("HBBI", 0x06, 0, 0, 0)  # the BPF instruction "return 0": keep nothing of a packet


class PeerSocket(NamedTuple):
    """A socket to another rank. `name`: the kernel's name of it, unique while it is open."""

    name: str
    rank: int


def count_timeouts(sockets: Mapping[int, PeerSocket]) -> dict[int, int]:
    """Return how often in a row packets to each peer were repeated because nothing was acknowledged in time.

    The first repetition is due after 0.2 s or more, each further one after twice the time of the last. A peer that is
    frozen acknowledges packets until its buffers are full; asking it for room is not counted. `sockets`: by
    descriptor. Callable from any thread, also while collectives wait.
    """
    counts: dict[int, int] = {}
    for connection, peer in _iter_open(sockets):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        counts[peer.rank] = max(counts.get(peer.rank, 0), info[_RETRANSMITS])
    return counts


def drop_incoming_packets(sockets: Mapping[int, PeerSocket]) -> None:
    """Let the kernel drop all packets that arrive on these sockets, as if their network were down."""
    program = ctypes.create_string_buffer(_RETURN)
    filters = struct.pack("HL", 1, ctypes.addressof(program))
    for connection, _ in _iter_open(sockets):
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)


def shut_down(sockets: Mapping[int, PeerSocket]) -> None:
    """Shut the connections down, which makes the collectives that wait for them fail on both sides."""
    for connection, _ in _iter_open(sockets):
        with contextlib.suppress(OSError):  # no longer connected
            connection.shutdown(socket.SHUT_RDWR)


def _iter_open(sockets: Mapping[int, PeerSocket]) -> Iterator[tuple[socket.socket, PeerSocket]]:
    """Yield duplicates of the sockets, without those whose descriptor has been closed, and perhaps reused, since."""
    for descriptor, peer in sockets.items():
        with contextlib.suppress(OSError):  # closed
            duplicate = os.dup(descriptor)
            with socket.socket(fileno=duplicate) as connection:
                if read_socket_name(duplicate) == peer.name:
                    yield connection, peer


def read_socket_name(descriptor: int) -> str:
    """Return the kernel's name of an open socket, or another text; "" if the descriptor is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
