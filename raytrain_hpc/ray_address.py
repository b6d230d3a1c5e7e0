"""Address of the Ray cluster, checked before Ray is imported: another server at it is refused within seconds."""

from __future__ import annotations

import os
import socket

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import ClusterError

LOCAL = "local"
_RAY_CLIENT = "ray://"
_CONNECT_TIMEOUT_S, _ANSWER_TIMEOUT_S = 2.0, 5.0
START_RAY = "start Ray with `ray start --head` or correct the address (its port is 6379 by default)"
# What a gRPC client sends first: the preface of HTTP/2 and an empty SETTINGS frame. The server answers with SETTINGS.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS_FRAME = 4
_FRAME_HEADER_BYTES = 9
_RAY_HEALTH_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"


def get_cluster_address(config: Config) -> str:
    """Return cluster.address if set, else RAY_ADDRESS, else "auto". "local" means to start a cluster."""
    if config.cluster.address != AUTO:
        return config.cluster.address
    return os.environ.get("RAY_ADDRESS") or AUTO


def check_address(config: Config) -> None:
    """Raise ClusterError unless Ray answers at an explicit cluster address. Ray itself would retry for much longer."""
    address = get_cluster_address(config)
    if address in (AUTO, LOCAL) or (problem := find_address_problem(address)) is None:
        return
    origin = config.origin("cluster.address") if config.cluster.address != AUTO else "RAY_ADDRESS"
    where = f" ({origin})" if origin else ""
    raise ClusterError(f"cluster.address={address}{where}: {problem}; {START_RAY}, or use cluster.address=local")


def find_address_problem(address: str) -> str | None:
    """Return why Ray's head cannot be used at an address, or None if it answers there. Takes at most 12 s.

    Connections of the Ray client (ray://) and with TLS (RAY_USE_TLS) are checked less closely.
    """
    place = _parse_address(address)
    if place is None:
        return "is not of the form host:port"
    try:
        with socket.create_connection(place, timeout=_CONNECT_TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                return None
            problem = _describe_answer(_exchange_preface(connection))
    except OSError:
        return "nothing answers there"
    return problem if problem is not None or address.startswith(_RAY_CLIENT) else _check_health(address)


def _parse_address(address: str) -> tuple[str, int] | None:
    """Return host and port of `host:port`, `[IPv6]:port` or `ray://host:port`; None for anything else."""
    host, _, port = address.removeprefix(_RAY_CLIENT).rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        return None
    return host, int(port)


def _exchange_preface(connection: socket.socket) -> bytes | None:
    """Send the preface of HTTP/2 and return the first bytes of the answer; None if there is no answer in time."""
    connection.settimeout(_ANSWER_TIMEOUT_S)
    try:
        connection.sendall(_HTTP2_PREFACE)
        return connection.recv(64)
    except TimeoutError:
        return None
    except OSError:  # closed by the server
        return b""


def _describe_answer(answer: bytes | None) -> str | None:
    """Return what kind of server gave this answer to the preface of HTTP/2, or None if it speaks HTTP/2."""
    if answer is None:
        return f"a server accepts connections there but sent nothing in {_ANSWER_TIMEOUT_S:g} s, so it is not Ray"
    if not answer:
        return "a server there closes connections at once, so it is not Ray"
    if answer.startswith((b"HTTP/1", b"<")):  # some answer an unknown version with an HTML page alone
        return "an HTTP server, such as a dashboard, answers there, and not Ray's head"
    if answer[:1] in (b"-", b"+"):
        return "a Redis server answers there, and not Ray's head"
    if len(answer) < _FRAME_HEADER_BYTES or answer[3] != _SETTINGS_FRAME:
        return "another server answers there, and not Ray's head"
    return None


def _check_health(address: str) -> str | None:
    """Return why a gRPC server is not a healthy head of Ray, or None if it is one. Needs no token."""
    import grpc

    options = [("grpc.enable_http_proxy", 0)]  # as Ray does
    with grpc.insecure_channel(address, options) as channel:
        try:
            channel.unary_unary(_RAY_HEALTH_METHOD)(b"", timeout=_ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:  # a head that requires a token
                return None
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"a server there did not answer Ray's health check in {_ANSWER_TIMEOUT_S:g} s"
            return "a gRPC server answers there, and not Ray's head"
    return None
