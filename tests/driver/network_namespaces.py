"""Two Ray nodes in separate network namespaces whose connection can be cut. Needs root and Linux's `ip`."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.warm_ray_workers import make_command

CPUS = 2
FIRST_ADDRESS, SECOND_ADDRESS = "10.77.0.1", "10.77.0.2"


def can_create_namespaces() -> bool:
    """Return whether this machine permits network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    probe = f"raytrain-probe-{os.getpid()}"  # other processes may probe at the same time
    return _ip("netns", "add", probe).returncode == 0 and _ip("netns", "del", probe).returncode == 0


class NamespacedNodes:
    """Two Ray nodes. Run a driver with the environment `env` and the command that `on_first_node` returns.

    `python`: with which workers are started.
    """

    def __init__(self, python: Path | str = sys.executable) -> None:
        self._ray = make_command(python, "ray.scripts.scripts")
        self._names = [f"raytrain-{letter}-{os.getpid()}" for letter in "ab"]
        self._interfaces = [f"rt{letter}{os.getpid() % 100000}" for letter in "ab"]
        self._directory = tempfile.mkdtemp(prefix="apart-")
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
        self.env = env | {"RAY_worker_niceness": "0"}
        for name in self._names:
            _ip("netns", "add", name, check=True)
        first, second = self._interfaces
        _ip(
            "link",
            "add",
            first,
            "netns",
            self._names[0],
            "type",
            "veth",
            "peer",
            "name",
            second,
            "netns",
            self._names[1],
        )
        for name, interface, address in zip(
            self._names, self._interfaces, (FIRST_ADDRESS, SECOND_ADDRESS), strict=True
        ):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", interface, check=True)
            _ip("-n", name, "link", "set", "lo", "up", check=True)
            _ip("-n", name, "link", "set", interface, "up", check=True)
        self._start(0, "--head", "--port=6399", f"--temp-dir={self._directory}", "--include-dashboard=false")
        self.env["RAY_ADDRESS"] = f"{FIRST_ADDRESS}:6399"
        self._add_second_node()

    def on_first_node(self, *command: str) -> list[str]:
        """Return the command line that runs the command on the head node."""
        return ["ip", "netns", "exec", self._names[0], *command]

    def cut(self) -> None:
        """Drop all packets between the nodes. Connections stay open."""
        _ip("-n", self._names[1], "link", "set", self._interfaces[1], "down", check=True)

    def heal(self) -> None:
        """Restore the connection."""
        _ip("-n", self._names[1], "link", "set", self._interfaces[1], "up", check=True)

    def fail_second_node(self, workers: Sequence[dict[str, Any]]) -> list[int]:
        """Cut the connection; return the ranks of the workers on the second node."""
        pids = {process.pid for process in self._processes(1)}
        self.cut()
        return [process["rank"] for process in workers if process["pid"] in pids]

    def restore(self) -> None:
        """Replace the second node by a new one."""
        for process in self._processes(1):
            process.kill()
        self.heal()
        self._add_second_node()

    def close(self) -> None:
        for number, name in enumerate(self._names):
            for process in self._processes(number):
                process.kill()
            _ip("netns", "del", name)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _add_second_node(self) -> None:
        """Start the node. A driver of Ray 2.50 takes its address from a file, which must remain that of the head."""
        files = Path(self._directory).glob("session_*/node_ip_address.json")
        address_files = {path: path.read_text() for path in files}
        self._start(1, f"--address={FIRST_ADDRESS}:6399")
        for path, text in address_files.items():
            path.write_text(text)

    def _start(self, number: int, *words: str) -> None:
        address = (FIRST_ADDRESS, SECOND_ADDRESS)[number]
        command = ["ip", "netns", "exec", self._names[number], *self._ray, "start", *words]
        command.append(f"--node-ip-address={address}")
        subprocess.run([*command, f"--num-cpus={CPUS}"], env=self.env, check=True, capture_output=True, timeout=60)

    def _processes(self, number: int) -> list[psutil.Process]:
        pids = _ip("netns", "pids", self._names[number]).stdout.split()
        return [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]


def _ip(*words: str, check: bool = False) -> Any:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)
