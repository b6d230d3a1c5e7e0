"""Ray workers that are forked from a process with torch already imported; a usual start imports it for two seconds.

Ray starts its workers with the Python of the process that starts Ray. `WarmRayWorkers.python` is an executable in place
of it, which has workers forked and is Python otherwise. Clusters that a test starts as a user does, in a script or by
the command line, start their workers as usual.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn

START_TIMEOUT_S = 120
LAUNCHER = """#!/bin/sh
case "$1" in
*/ray/_private/workers/*.py) exec {client} "$@" ;;
esac
exec {python} "$@"
"""
RUN_MODULE = "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module({!r}, None, '__main__', True)"
_CLONE_NEWNET = 0x40000000


class WarmRayWorkers:
    """A server process that forks a worker whenever a Ray starts one that was itself started with `python`."""

    def __init__(self, modules: list[str]) -> None:
        """Start the server, which imports `modules`. None may import Ray, which reads variables of a worker then."""
        self._directory = tempfile.TemporaryDirectory(prefix="ray-workers-")
        path = Path(self._directory.name)
        command = [sys.executable, __file__, "serve", str(path), *modules]
        self._server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        # -I and -S: without site-packages, this file is loaded in 20 ms.
        client = shlex.join([sys.executable, "-I", "-S", __file__, "start", str(path)])
        self.python = path / "python"
        self.python.write_text(LAUNCHER.format(client=client, python=shlex.quote(sys.executable)))
        self.python.chmod(0o755)

    def close(self) -> None:
        """Kill the server. The workers end with their cluster."""
        self._server.kill()
        self._server.wait()
        self._directory.cleanup()


@contextmanager
def use_python(python: Path | str) -> Iterator[None]:
    """Let a Ray that this process starts inside the context run its workers with `python`."""
    original, sys.executable = sys.executable, str(python)
    try:
        yield
    finally:
        sys.executable = original


def make_command(python: Path | str, module: str) -> list[str]:
    """Return a command like `python -m module`; a Ray that it starts runs its workers with `python`."""
    return [sys.executable, "-c", RUN_MODULE.format(module), str(python)]


def find_worker(python: Path | str, pid: int) -> int | None:
    """Return the process that was forked in place of the process `pid`, which Ray has started with `python`."""
    path = _get_pid_file(Path(python).parent, pid)
    return int(path.read_text()) if path.exists() else None


def _get_pid_file(directory: Path, pid: int) -> Path:
    return directory / f"worker-of-{pid}"


def start_worker(directory: str, arguments: list[str]) -> int:
    """Let the server fork a worker, in place of this process that Ray has started; return when the worker has ended.

    `arguments`: Ray's default_worker.py and its arguments; if there is a runtime environment, after setup_worker.py,
    which would import Ray only to set it up.
    """
    import time

    context: dict[str, object] = {}
    words = []
    for word in arguments[Path(arguments[0]).name == "setup_worker.py" :]:
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language":
            words.append(word)
    os.environ.update({name: os.path.expandvars(value) for name, value in dict(context.get("env_vars") or {}).items()})
    if prefix := context.get("command_prefix"):  # such as a change of the directory
        command = [sys.executable, "-I", "-S", __file__, "start", directory, *words]
        os.execvp("bash", ["bash", "-c", " ".join([*prefix, "exec", shlex.join(command)])])

    deadline = time.monotonic() + START_TIMEOUT_S
    with socket.socket(socket.AF_UNIX) as connection, open("/proc/self/ns/net") as network:
        while connection.connect_ex(f"{directory}/socket"):
            if time.monotonic() > deadline:
                return 1
            time.sleep(0.02)
        request = json.dumps({"argv": words, "environ": dict(os.environ), "directory": os.getcwd()}).encode()
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2, network.fileno()])
        connection.sendall(request)
        connection.recv(1)
    return 0


def serve(directory: Path, modules: list[str]) -> NoReturn:
    """Import `modules`, and fork a worker per connection until the parent process has ended."""
    parent = os.getppid()
    for module in modules:
        import_module(module)
    assert "ray" not in sys.modules
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for exit codes
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{directory}/socket.new")
    server.listen(64)
    os.rename(f"{directory}/socket.new", f"{directory}/socket")
    server.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        size, descriptors, _, _ = socket.recv_fds(connection, 4, 4)
        request = b""
        while len(request) < int.from_bytes(size, "big"):
            request += connection.recv(1 << 16)
        client = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if os.fork() == 0:
            server.close()
            _get_pid_file(directory, client).write_text(str(os.getpid()))
            _become_worker(json.loads(request), descriptors)
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
    sys.exit(0)


def _become_worker(request: dict[str, object], descriptors: list[int]) -> NoReturn:
    """Run Ray's script for workers in this process, which keeps the connection open while it lives."""
    os.setpgid(0, 0)  # Ray kills the process group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    network = descriptors.pop()
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        assert ctypes.CDLL(None).setns(network, _CLONE_NEWNET) == 0
    os.close(network)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = request["argv"]
    added = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *added]
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
        serve(Path(sys.argv[2]), sys.argv[3:])
    sys.exit(start_worker(sys.argv[2], sys.argv[3:]))
