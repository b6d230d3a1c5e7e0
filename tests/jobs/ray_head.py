"""A Ray head with a dashboard, to which jobs are submitted."""

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

from tests.warm_ray_workers import find_worker, make_command

BIN = Path(sys.executable).parent
SMALL = """
data: {path: synthetic}
model: {vocab_size: 64, hidden_size: 32, num_layers: 2, num_heads: 4}
train: {seq_len: 16, global_batch_size: 4}
lr_scheduler: {name: constant, warmup_steps: 0}
eval: {samples: 4}
cluster: {workers: 2}
logging: {interval: 1, tensorboard: false}
"""


@dataclass
class Head:
    """A Ray head of the tests, and the commands that use it."""

    process: psutil.Process
    env: dict[str, str]
    project: Path  # the working directory of submitted jobs
    python: Path  # with which workers are started

    def ray(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "ray"), *words], env=self.env, cwd=self.project, capture_output=True, text=True, timeout=timeout
        )

    def submit(self, name: str, *words: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        waiting = [] if wait else ["--no-wait"]
        entry = ["raytrain-hpc", "train", "small.yaml", *words]
        return self.ray("job", "submit", "--submission-id", name, "--working-dir", ".", *waiting, "--", *entry)

    def logs(self, name: str) -> str:
        return self._request("GET", f"{name}/logs")["logs"]

    def status(self, name: str) -> str:
        return self._request("GET", name)["status"]

    def stop(self, name: str) -> None:
        """Stop a job, as `ray job stop` does."""
        assert self._request("POST", f"{name}/stop") == {"stopped": True}
        wait_for(lambda: self.status(name) != "RUNNING", "the job to stop", 30)

    def find_workers(self) -> set[int | None]:
        """Return the pids of Ray's workers on the head."""
        return {find_worker(self.python, process.pid) for process in self.process.children(recursive=True)}

    def _request(self, method: str, path: str) -> Any:
        url = f"{self.env['RAY_API_SERVER_ADDRESS']}/api/jobs/{path}"
        token = {"Authorization": f"Bearer {self.env['RAY_AUTH_TOKEN']}"}
        response = requests.request(method, url, headers=token, timeout=30)
        response.raise_for_status()
        return response.json()


@contextlib.contextmanager
def start_head(python: Path = Path(sys.executable)) -> Iterator[Head]:
    """Start a head, and stop it when the context ends. `python`: with which workers are started."""
    home = Path(tempfile.mkdtemp(prefix="rj-", dir="/tmp"))  # short: socket paths have at most 107 characters
    project = home / "project"
    project.mkdir()
    (project / "small.yaml").write_text(SMALL)
    port, dashboard, agent = free_ports(3)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # a separate token: the user's is not touched, and the head is not open to all
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
    }
    words = f"start --head --block --num-cpus=4 --port={port} --dashboard-port={dashboard} --temp-dir={home}/ray"
    with (home / "head.log").open("w") as log:
        process = subprocess.Popen(
            [*make_command(python, "ray.scripts.scripts"), *words.split(), f"--dashboard-agent-listen-port={agent}"],
            env=env,
            cwd=home,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    env["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{dashboard}"
    head = Head(psutil.Process(process.pid), env, project, python)
    try:
        wait_for(lambda: "runtime started" in (home / "head.log").read_text(), "the head to start", 60)
        yield head
    finally:
        terminate_tree(head.process)
        process.wait()
        shutil.rmtree(home)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for reserved in sockets:
        reserved.bind(("127.0.0.1", 0))
    ports = [reserved.getsockname()[1] for reserved in sockets]
    for reserved in sockets:
        reserved.close()
    return ports


def wait_for(condition: Callable[[], object], event: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {event}"
        time.sleep(0.05)


def terminate_tree(process: psutil.Process) -> None:
    processes = [process, *process.children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, remaining = psutil.wait_procs(processes, timeout=2)
    for survivor in remaining:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            survivor.kill()
    psutil.wait_procs(remaining, timeout=15)
