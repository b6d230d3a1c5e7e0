"""A simulated cluster of two nodes of two CPUs each, in processes of its own, one of which can be lost, drained, added.

As a script it is that cluster: prints its address, does what it reads on its input, and ends when that does.
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
from typing import Any

import psutil

CPUS = 2
LEAN_HEAD = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # nobody asks these
HEADLESS_S = 5.0
_SIGNALS = {"lose": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}


class TwoNodes:
    """A handle on it. `env`: the environment of a driver on this cluster; the first node is where drivers are.

    `stored`: what the head knows is in a Redis server, so that another head can go on from there.
    """

    def __init__(self, *, stored: bool = False) -> None:
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
        env |= {"RAY_worker_niceness": "0"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *(["stored"] if stored else [])],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.env = env | {"RAY_ADDRESS": self._answer()}
        self._family = {self._process.pid: psutil.Process(self._process.pid)}

    def tell(self, word: str) -> str:
        """lose: all processes of the second node are killed at once; drain: it is going to be taken away; add: another;
        behead: the head's own process (GCS) is killed, and another one started after some seconds; freeze: all
        processes of the second node stop where they are; thaw: they go on.

        Returns the id of the node that this is about.
        """
        self._note_family()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._answer()

    def inside(self, *command: str) -> list[str]:
        """The command, to be run on the first node: anywhere."""
        return list(command)

    def strike(self, workers: Sequence[dict[str, Any]], how: str = "lose") -> list[int]:
        """Lose or freeze the second node. Returns the ranks of these workers that were there."""
        lost = self.tell(how)
        return [one["rank"] for one in workers if one["node"] == lost]

    def restore(self) -> None:
        """Another one in its place."""
        self.tell("add")

    def close(self) -> None:
        self._note_family()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        for one in psutil.wait_procs(self._family.values(), timeout=10)[1]:
            one.kill()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline().strip()):
            raise RuntimeError("the cluster has ended; what it said is above")
        return line

    def _note_family(self) -> None:
        for one in psutil.Process(self._process.pid).children(recursive=True):
            self._family[one.pid] = one


def _redis() -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", tempfile.gettempdir()],
        stdout=subprocess.DEVNULL,
    )
    os.environ["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{port}"
    return server


def _signal(raylet: int, number: int) -> None:
    """To all that is on a node; nobody where it has given itself up."""
    with contextlib.suppress(psutil.NoSuchProcess):
        node = psutil.Process(raylet)
        for one in [node, *node.children(recursive=True)]:
            one.send_signal(number)


def main() -> None:
    store = _redis() if "stored" in sys.argv else None
    from ray._raylet import GcsClient
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes: list[Any] = [cluster.add_node(num_cpus=CPUS, **LEAN_HEAD) for _ in range(2)]
    cluster.wait_for_nodes(timeout=60)
    print(cluster.address, flush=True)
    for word in map(str.strip, sys.stdin):
        node = nodes[-1]
        if word in ("lose", "freeze", "thaw"):
            _signal(node.all_processes["raylet"][0].process.pid, _SIGNALS[word])
            if word == "lose":
                nodes.pop()
        elif word == "drain":
            deadline = int(1000 * (time.time() + 600))
            GcsClient(address=cluster.address).drain_node(node.node_id, 2, "preempted", deadline)
        elif word == "add":
            node = cluster.add_node(num_cpus=CPUS, **LEAN_HEAD)
            nodes.append(node)
        elif word == "behead":
            node = cluster.head_node
            node.kill_gcs_server()
            time.sleep(HEADLESS_S)
            node.start_gcs_server()
        print(node.node_id, flush=True)
    cluster.shutdown()
    if store is not None:
        store.kill()


if __name__ == "__main__":
    main()
