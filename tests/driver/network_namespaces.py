"""Two Ray nodes in network namespaces of their own, whose only connection can be cut. Needs root, and Linux's `ip`."""

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

CPUS = 2
HEAD, OTHER = "10.77.0.1", "10.77.0.2"


def allowed() -> bool:
    """Whether this machine lets us make namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    probe = f"raytrain-probe-{os.getpid()}"  # other processes may be asking the same
    return _ip("netns", "add", probe).returncode == 0 and _ip("netns", "del", probe).returncode == 0


class Apart:
    """A handle on them. `env`: the environment of a driver, to be run `inside` the namespace of the head."""

    def __init__(self) -> None:
        self._names = [f"raytrain-{one}-{os.getpid()}" for one in "ab"]
        self._ends = [f"rt{one}{os.getpid() % 100000}" for one in "ab"]
        self._directory = tempfile.mkdtemp(prefix="apart-")
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
        self.env = env | {"RAY_worker_niceness": "0"}
        for name in self._names:
            _ip("netns", "add", name, check=True)
        one, other = self._ends
        _ip("link", "add", one, "netns", self._names[0], "type", "veth", "peer", "name", other, "netns", self._names[1])
        for name, end, address in zip(self._names, self._ends, (HEAD, OTHER), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end, check=True)
            _ip("-n", name, "link", "set", "lo", "up", check=True)
            _ip("-n", name, "link", "set", end, "up", check=True)
        self._start(0, "--head", "--port=6399", f"--temp-dir={self._directory}", "--include-dashboard=false")
        self.env["RAY_ADDRESS"] = f"{HEAD}:6399"
        self._start(1, f"--address={HEAD}:6399")

    def inside(self, *command: str) -> list[str]:
        """The command, to be run on the node of the head."""
        return ["ip", "netns", "exec", self._names[0], *command]

    def cut(self) -> None:
        """From now on nothing gets through, either way, and nobody is told."""
        _ip("-n", self._names[1], "link", "set", self._ends[1], "down", check=True)

    def heal(self) -> None:
        """And now it does again."""
        _ip("-n", self._names[1], "link", "set", self._ends[1], "up", check=True)

    def strike(self, workers: Sequence[dict[str, Any]]) -> list[int]:
        """Cut them apart. Returns the ranks of these workers that are on the other side."""
        there = {one.pid for one in self._processes(1)}
        self.cut()
        return [one["rank"] for one in workers if one["pid"] in there]

    def restore(self) -> None:
        """A node on the other side again, in the place of the one that was given up on."""
        for one in self._processes(1):
            one.kill()
        self.heal()
        self._start(1, f"--address={HEAD}:6399")

    def close(self) -> None:
        for number, name in enumerate(self._names):
            for one in self._processes(number):
                one.kill()
            _ip("netns", "del", name)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, number: int, *words: str) -> None:
        address = (HEAD, OTHER)[number]
        ray = str(Path(sys.executable).with_name("ray"))  # of this environment, activated or not
        command = ["ip", "netns", "exec", self._names[number], ray, "start", *words, f"--node-ip-address={address}"]
        subprocess.run([*command, f"--num-cpus={CPUS}"], env=self.env, check=True, capture_output=True, timeout=60)

    def _processes(self, number: int) -> list[psutil.Process]:
        pids = _ip("netns", "pids", self._names[number]).stdout.split()
        return [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]


def _ip(*words: str, check: bool = False) -> Any:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)
