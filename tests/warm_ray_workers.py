"""Ray workers that are forked from a process with torch already imported; a usual start imports it for two seconds.

Ray starts them by `py_executable` of the runtime environment. Clusters that a test starts otherwise, as a user does, by
the command line or in a script, start their workers as usual.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

START_TIMEOUT_S = 120


class WarmRayWorkers:
    """A server process that forks a worker whenever Ray starts one with `runtime_env`."""

    def __init__(self, modules: list[str]) -> None:
        """Start the server, which imports `modules`. None may import Ray, which reads variables of a worker then."""
        self._directory = tempfile.TemporaryDirectory(prefix="ray-workers-")
        path = Path(self._directory.name) / "socket"
        command = [sys.executable, __file__, "serve", str(path), *modules]
        self._server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        # -I and -S: without site-packages, this file is loaded in 20 ms.
        client = [sys.executable, "-I", "-S", __file__, "start", str(path)]
        self.runtime_env: dict[str, Any] = {"py_executable": shlex.join(client)}

    def close(self) -> None:
        """Kill the server. The workers end with their cluster."""
        self._server.kill()
        self._server.wait()
        self._directory.cleanup()


def start_worker(path: str, arguments: list[str]) -> int:
    """Let the server fork a worker, in place of this process that Ray has started; return when the worker has ended."""
    import time

    deadline = time.monotonic() + START_TIMEOUT_S
    with socket.socket(socket.AF_UNIX) as connection:
        while connection.connect_ex(path):
            if time.monotonic() > deadline:
                return 1
            time.sleep(0.02)
        request = json.dumps({"argv": arguments, "environ": dict(os.environ), "directory": os.getcwd()}).encode()
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
        connection.sendall(request)
        connection.recv(1)
    return 0


def serve(path: str, modules: list[str]) -> NoReturn:
    """Import `modules`, and fork a worker per connection until the parent process has ended."""
    parent = os.getppid()
    for module in modules:
        import_module(module)
    assert "ray" not in sys.modules
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for exit codes
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{path}.new")
    server.listen(64)
    os.rename(f"{path}.new", path)
    server.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        size, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        request = b""
        while len(request) < int.from_bytes(size, "big"):
            request += connection.recv(1 << 16)
        if os.fork() == 0:
            server.close()
            _become_worker(json.loads(request), descriptors)
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
    sys.exit(0)


def _become_worker(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run Ray's script for workers in this process, which keeps the connection open while it lives."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    sys.exit(start_worker(sys.argv[2], sys.argv[3:]))
