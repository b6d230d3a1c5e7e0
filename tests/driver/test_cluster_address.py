"""Addresses at which something else than Ray answers, with real servers; socket paths that are too long for Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import grpc
import pytest
import ray

from raytrain_hpc import ray_address
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.data.preprocess.ray_executor import RayDataExecutor
from raytrain_hpc.driver.ray_cluster import is_same_address
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.ray_address import check_address, find_address_problem
from raytrain_hpc.ray_temp_dir import MAX_SOCKET_PATH_BYTES, check_socket_path, get_socket_path


@contextlib.contextmanager
def start_http_server() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def start_redis_server() -> Iterator[int]:
    """Run a real Redis where it is installed, else answer as one does to a command that it does not know."""
    if shutil.which("redis-server") is None:
        with start_server(lambda peer: peer.sendall(b"-ERR unknown command 'PRI', with args beginning with:\r\n")) as p:
            yield p
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", "/tmp"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def start_grpc_server() -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None)


@contextlib.contextmanager
def start_server(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Accept one connection and answer it; keep it open until the context ends."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as connections:

        def serve() -> None:
            with contextlib.suppress(OSError):
                peer = connections.enter_context(server.accept()[0])
                answer(peer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]


@contextlib.contextmanager
def reserve_closed_port() -> Iterator[int]:
    with socket.socket() as reserved:  # bound, but it does not listen
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


SERVERS = {
    "closed port": (reserve_closed_port, "nothing answers there"),
    "HTTP": (start_http_server, "an HTTP server, such as a dashboard, answers there"),
    "Redis": (start_redis_server, "a Redis server answers there"),
    "gRPC of another program": (start_grpc_server, "a gRPC server answers there, and not Ray's head"),
    "silence": (lambda: start_server(lambda peer: None), "accepts connections there but sent nothing in 0.3 s"),
    "closes": (lambda: start_server(lambda peer: peer.close()), "closes connections at once"),
    "greeting": (lambda: start_server(lambda peer: peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")), "another server"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_other_server_is_named_in_bounded_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "silence":
        monkeypatch.setattr(ray_address, "_ANSWER_TIMEOUT_S", 0.3)
    start, expected = SERVERS[name]
    with start() as port:
        began = time.monotonic()
        with pytest.raises(ClusterError) as error:
            check_address(load_config(None, [f"cluster.address=127.0.0.1:{port}"]))
        assert time.monotonic() - began < 5
    text = str(error.value)
    assert text.startswith(f"cluster.address=127.0.0.1:{port} (load_config): ") and expected in text
    assert "start Ray with `ray start --head`" in text and "6379" in text and "\n" not in text


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "somewhere", "host:port", "127.0.0.1:0", ":6379"])
def test_malformed_address_is_refused(address: str) -> None:
    assert find_address_problem(address) == "is not of the form host:port"


def test_prepare_names_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # a connection of the tests would be used
    with start_http_server() as port, pytest.raises(ClusterError, match="an HTTP server.*use --engine local"):
        RayDataExecutor(f"127.0.0.1:{port}", 1)


@pytest.mark.parametrize(
    ("address", "local_address", "is_same"),
    [
        ("10.0.0.1:6379", "10.0.0.1:6379", True),
        ("127.0.0.1:6379", "10.0.0.1:6379", True),
        ("localhost:6379", "10.0.0.1:6379", True),
        ("127.0.0.1:6380", "10.0.0.1:6379", False),
        ("10.0.0.2:6379", "10.0.0.1:6379", False),
        ("ray://10.0.0.1:6379", "10.0.0.1:6379", False),
        ("127.0.0.1:6379", None, False),
    ],
)
def test_address_of_the_cluster_on_this_machine(address: str, local_address: str | None, is_same: bool) -> None:
    """It is joined as `auto`, with the authentication token that Ray then looks up."""
    assert is_same_address(address, local_address) == is_same


def test_head_of_a_cluster_is_accepted(ray_cluster: None) -> None:
    head = ray.get_runtime_context().gcs_address
    raylet = ray.nodes()[0]["NodeManagerPort"]
    assert find_address_problem(head) is None
    assert find_address_problem(f"[::1]:{head.rpartition(':')[2]}") in (None, "nothing answers there")  # without IPv6
    assert "not Ray's head" in str(find_address_problem(f"{head.rpartition(':')[0]}:{raylet}"))


def test_socket_path_has_the_length_of_those_that_ray_creates(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = Path(ray.nodes()[0]["ObjectStoreSocketName"])
    monkeypatch.setenv("RAY_TMPDIR", str(created.parents[3]))
    assert len(str(get_socket_path())) == len(str(created))
    check_socket_path()


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_too_long_socket_path_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(name, "/")
    room = MAX_SOCKET_PATH_BYTES - len(str(get_socket_path()))
    monkeypatch.setenv(name, "/" + "d" * (room - 1))  # and a separator
    check_socket_path()
    monkeypatch.setenv(name, "/" + "d" * (room - 2) + "é")
    with pytest.raises(ClusterError, match=f"^{name}=/d+é: .* would have 108 bytes, at most 107 .*set RAY_TMPDIR"):
        check_socket_path()
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match="too long"):
        probe.bind(os.fsencode(get_socket_path()))
