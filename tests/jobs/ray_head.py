"""A Ray head with a dashboard, to submit jobs to."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

BIN = Path(sys.executable).parent
SMALL = """
data: {path: synthetic}
model: {vocab_size: 64, hidden_size: 32, num_layers: 2, num_heads: 4}
train: {seq_len: 16, global_batch: 4, warmup: 0, schedule: constant, eval_samples: 4}
cluster: {workers: 2}
observe: {log_every: 1, tensorboard: false}
"""


@dataclass
class Head:
    """A Ray head of our own, and the commands that talk to it."""

    process: psutil.Process
    env: dict[str, str]
    project: Path  # what a user would submit with --working-dir .

    def ray(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "ray"), *words], env=self.env, cwd=self.project, capture_output=True, text=True, timeout=timeout
        )

    def submit(self, name: str, *words: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        waiting = [] if wait else ["--no-wait"]
        entry = ["raytrain-hpc", "train", "small.yaml", *words]
        return self.ray("job", "submit", "--submission-id", name, "--working-dir", ".", *waiting, "--", *entry)

    def logs(self, name: str) -> str:
        return self._ask("GET", f"{name}/logs")["logs"]

    def status(self, name: str) -> str:
        return self._ask("GET", name)["status"]

    def stop(self, name: str) -> None:
        """What `ray job stop` sends."""
        assert self._ask("POST", f"{name}/stop") == {"stopped": True}
        wait_for(lambda: self.status(name) != "RUNNING", "the job to stop", 30)

    def _ask(self, method: str, what: str) -> Any:
        url = f"{self.env['RAY_API_SERVER_ADDRESS']}/api/jobs/{what}"
        token = {"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
        answer = requests.request(method, url, headers=token, timeout=30)
        answer.raise_for_status()
        return answer.json()


@contextlib.contextmanager
def started_head() -> Iterator[Head]:
    """One, until the context is left."""
    home = Path(tempfile.mkdtemp(prefix="rj-", dir="/tmp"))  # short: sockets have paths of 107 characters at most
    project = home / "project"
    project.mkdir()
    (project / "small.yaml").write_text(SMALL)
    port, dashboard, agent = free_ports(3)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # a token of our own: neither the user's is touched nor is the head open to all
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
    }
    command = f"ray start --head --block --num-cpus=4 --port={port} --dashboard-port={dashboard} --temp-dir={home}/ray"
    with (home / "head.log").open("w") as log:
        started = subprocess.Popen(
            [*command.split(), f"--dashboard-agent-listen-port={agent}"],
            executable=BIN / "ray",
            env=env,
            cwd=home,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    made = Head(psutil.Process(started.pid), env | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}, project)
    try:
        wait_for(lambda: "runtime started" in (home / "head.log").read_text(), "the head to start", 60)
        yield made
    finally:
        end_with_children(made.process)
        started.wait()
        shutil.rmtree(home)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_for(true: Callable[[], object], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def end_with_children(process: psutil.Process) -> None:
    family = [process, *process.children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(family, timeout=15)
    for one in left:
        one.kill()
    psutil.wait_procs(left, timeout=15)
