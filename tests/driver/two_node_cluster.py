"""A simulated Ray cluster of two nodes with two CPUs each, one of which can be lost, frozen, drained or replaced.

As a script: print the address of the cluster, carry out the commands read from stdin, and end with stdin.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.warm_ray_workers import find_worker, use_python

CPUS = 2
LEAN_HEAD = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # unused here
HEAD_DOWNTIME_S = 5.0
_SIGNALS = {"lose": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}


class TwoNodeCluster:
    """Handle of the cluster. `env` is the environment of a driver on it; drivers run on the first node.

    `stored`: the head keeps its state in Redis, so that it survives a restart of the head. `cpus`: of each node
    at the start. The environment of a node has NODE_NUMBER, counted from 1 for the first. `python`: with which workers
    are started. `num_nodes`: that have not been lost.
    """

    def __init__(
        self, *, stored: bool = False, cpus: Sequence[int] = (CPUS, CPUS), python: Path | str = sys.executable
    ) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
        env |= {"RAY_worker_niceness": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, ",".join(map(str, cpus)), str(python), *(["stored"] if stored else [])],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.env = env | {"RAY_ADDRESS": self._read_reply()}
        self._processes = {self._process.pid: psutil.Process(self._process.pid)}
        self._python, self.num_nodes = python, len(cpus)

    def send(self, word: str) -> str:
        """Carry out one command, and return the id of the node that it concerns.

        lose: kill all processes of the second node; drain: announce its removal; add: add a node; behead: kill the
        head's GCS process and restart it after some seconds; freeze, thaw: stop and continue all processes of the
        second node.
        """
        self._record_processes()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        self.num_nodes += word.startswith("add") - (word == "lose")
        return self._read_reply()

    def find_workers(self, title: str) -> list[psutil.Process]:
        """Return the workers of all nodes whose titles contain a text, such as the class of an actor."""
        found = []
        for started in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                process = psutil.Process(find_worker(self._python, started.pid) or started.pid)
                found += [process] * (title in " ".join(process.cmdline()))
        return found

    def on_first_node(self, *command: str) -> list[str]:
        """Return the command line that runs the command on the first node, which is this machine."""
        return list(command)

    def fail_second_node(self, workers: Sequence[dict[str, Any]], command: str = "lose") -> list[int]:
        """Lose or freeze the second node; return the ranks of the workers that were on it."""
        node = self.send(command)
        return [worker["rank"] for worker in workers if worker["node_id"] == node]

    def restore(self) -> None:
        """Add a node in place of the lost one."""
        self.send("add")

    def close(self) -> None:
        self._record_processes()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        for process in psutil.wait_procs(self._processes.values(), timeout=10)[1]:
            process.kill()

    def _read_reply(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline().strip()):
            raise RuntimeError("the cluster has ended; see its output above")
        return line

    def _record_processes(self) -> None:
        for process in psutil.Process(self._process.pid).children(recursive=True):
            self._processes[process.pid] = process


def _start_redis() -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", tempfile.gettempdir()],
        stdout=subprocess.DEVNULL,
    )
    os.environ["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"
    return server


def _signal_node(raylet: int, number: int, python: str) -> None:
    """Send a signal to all processes of a node, if it still runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        node = psutil.Process(raylet)
        for process in [node, *node.children(recursive=True)]:
            worker = find_worker(python, process.pid)
            process.send_signal(number)
            if worker is not None:
                psutil.Process(worker).send_signal(number)


def main() -> None:
    python = sys.argv[2]
    with use_python(python):
        run_cluster(python)


def run_cluster(python: str) -> None:
    """Start the cluster, and carry out commands until stdin ends. `python`: with which Ray starts workers."""
    store = _start_redis() if "stored" in sys.argv else None
    from ray._raylet import GcsClient
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes: list[Any] = [
        cluster.add_node(num_cpus=int(cpus), env_vars={"NODE_NUMBER": str(number)}, **LEAN_HEAD)
        for number, cpus in enumerate(sys.argv[1].split(","), 1)
    ]
    num_started = len(nodes)
    cluster.wait_for_nodes(timeout=60)
    print(cluster.address, flush=True)
    for word in map(str.strip, sys.stdin):
        node = nodes[-1]
        if word in ("lose", "freeze", "thaw"):
            _signal_node(node.all_processes["raylet"][0].process.pid, _SIGNALS[word], python)
            if word == "lose":
                nodes.pop()
        elif word == "drain":
            deadline = int(1000 * (time.time() + 600))
            GcsClient(address=cluster.address).drain_node(node.node_id, 2, "preempted", deadline)
        elif word.startswith("add"):
            num_started += 1
            cpus = int(word.removeprefix("add") or CPUS)
            node = cluster.add_node(num_cpus=cpus, env_vars={"NODE_NUMBER": str(num_started)}, **LEAN_HEAD)
            nodes.append(node)
        elif word == "behead":
            node = cluster.head_node
            node.kill_gcs_server()
            time.sleep(HEAD_DOWNTIME_S)
            node.start_gcs_server()
        print(node.node_id, flush=True)
    cluster.shutdown()
    if store is not None:
        store.kill()


if __name__ == "__main__":
    main()
