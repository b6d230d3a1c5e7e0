"""Links to other ranks that are down, with real sockets."""

from __future__ import annotations

import os
import socket
import time

from raytrain_hpc.distributed.peer_links import (
    PeerSocket,
    count_timeouts,
    drop_incoming_packets,
    read_socket_name,
    shut_down,
)


def connect() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def make_peer(connection: socket.socket, rank: int) -> dict[int, PeerSocket]:
    return {connection.fileno(): PeerSocket(read_socket_name(connection.fileno()), rank)}


def test_only_a_network_that_is_down_acknowledges_nothing() -> None:
    near, far = connect()
    with near, far:
        sockets = make_peer(near, 3)
        assert count_timeouts(sockets) == {3: 0}
        near.sendall(b"x" * 1000)  # nobody reads it, as in a frozen process
        time.sleep(0.3)
        assert count_timeouts(sockets) == {3: 0}
        near.setblocking(False)
        while True:  # until the buffers of both sides are full
            try:
                near.send(b"x" * (1 << 16))
            except BlockingIOError:
                break
        time.sleep(0.8)
        assert count_timeouts(sockets) == {3: 0}, "the kernel of a frozen process answers"


def test_a_rank_that_receives_nothing_is_silent_in_both_directions() -> None:
    near, far = connect()
    with near, far:
        drop_incoming_packets(make_peer(far, 0))
        near.sendall(b"from near")
        far.sendall(b"from far")
        time.sleep(1.0)
        assert count_timeouts(make_peer(near, 1))[1] >= 2, "far acknowledges nothing"
        assert count_timeouts(make_peer(far, 0))[0] >= 2, "far does not see what near acknowledges"
        assert near.recv(100) == b"from far", "what far sends still leaves"
        far.settimeout(0.1)
        try:
            raise AssertionError(far.recv(100))
        except TimeoutError:
            pass


def test_descriptors_that_mean_other_files_by_now_are_left_alone() -> None:
    near, far = connect()
    with near, far:
        sockets = make_peer(near, 1) | {9999: PeerSocket("socket:[1]", 2)}
        stale = {near.fileno(): PeerSocket("socket:[1]", 1)}
        assert count_timeouts(stale) == {} and count_timeouts(sockets) == {1: 0}
        shut_down(stale)
        near.sendall(b"still open")
        assert far.recv(100) == b"still open"
        shut_down(sockets)
        assert far.recv(100) == b""
        descriptor = near.detach()
        os.close(descriptor)
        assert count_timeouts({descriptor: sockets[descriptor]}) == {}
