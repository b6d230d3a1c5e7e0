"""Agent that watches the workers of one node through shared memory, collects their stacks, and kills them by pid.

It runs in the driver's process for the driver's own node, and as a Ray actor on every other node. It depends on no
reply from a worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.preemption_notice import PreemptionNotice
from raytrain_hpc.elastic.watchdog import Suspect, WorkerHealth, compute_timeouts, find_suspects
from raytrain_hpc.runtime.heartbeat import HeartbeatReader, set_thread_name

_POLL_INTERVAL_S = 0.05
_MAX_POLL_DELAY_S = 0.25  # after a longer gap between two polls, report no suspects for as long again
_STACKS_TIMEOUT_S = 0.1
_STEP_WINDOW = 32  # number of step times over which the median is taken

HeartbeatPaths = Mapping[int, tuple[int, str]]  # rank -> (pid, path of its heartbeat file)


@dataclass(frozen=True)
class NodeHealth:
    """The last reading of an agent: unresponsive ranks, and the health of every rank of its node.

    `is_preempted`: the node's cloud has announced that it will be reclaimed.
    """

    suspects: list[Suspect]
    workers: dict[int, WorkerHealth]
    is_preempted: bool = False


class NodeAgent:
    """Watcher of the workers of one node. A thread polls their heartbeats every 0.05 s."""

    def __init__(self, config: Config, orphan_timeout_s: float = inf):
        """Start the polling thread.

        If no request arrives for `orphan_timeout_s`, the workers are killed: the run continues without this node.
        """
        self._config, self._orphan_timeout_s, self._last_query_time = config, orphan_timeout_s, time.monotonic()
        self._heartbeat_of_pid: dict[int, HeartbeatReader] = {}  # each file is opened once
        self._heartbeat_of_rank: dict[int, HeartbeatReader] = {}
        self._step_times: deque[float] = deque(maxlen=_STEP_WINDOW)
        self._last_timed_step: dict[int, int] = {}
        self._suspects: list[Suspect] = []
        self._worker_health: dict[int, WorkerHealth] = {}
        self._closed = threading.Event()
        self._notice = PreemptionNotice(config)
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def watch(self, workers: HeartbeatPaths) -> None:
        """Replace the ranks of this node that are watched."""
        with self._lock:
            for pid, path in workers.values():
                if pid not in self._heartbeat_of_pid:
                    with contextlib.suppress(OSError):  # it has ended, which Ray reports
                        self._heartbeat_of_pid[pid] = HeartbeatReader(pid, Path(path))
            self._heartbeat_of_rank = {
                rank: self._heartbeat_of_pid[pid] for rank, (pid, _) in workers.items() if pid in self._heartbeat_of_pid
            }
            self._suspects, self._worker_health = [], {}

    def get_health(self) -> NodeHealth:
        """Return the last reading. It also tells the agent that the driver still polls it."""
        self._last_query_time = time.monotonic()
        with self._lock:
            return NodeHealth(self._suspects, self._worker_health, self._notice.is_announced)

    def collect_stacks(self) -> dict[int, str]:
        """Return the thread stacks of every watched rank; empty or partial after 0.1 s."""
        with self._lock:
            for heartbeat in self._heartbeat_of_rank.values():
                heartbeat.request_stacks()
            deadline = time.monotonic() + _STACKS_TIMEOUT_S
            return {rank: heartbeat.read_stacks(deadline) for rank, heartbeat in self._heartbeat_of_rank.items()}

    def kill(self, rank: int) -> None:
        """Send SIGKILL to the process of a rank, which also ends a frozen one, and stop watching it."""
        with self._lock:
            heartbeat = self._heartbeat_of_rank.pop(rank, None)
            self._suspects = [suspect for suspect in self._suspects if suspect.rank != rank]
        if heartbeat is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(heartbeat.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop the polling threads."""
        self._closed.set()
        self._notice.close()

    def _run(self) -> None:
        set_thread_name("watch")
        last_poll, unreliable_until = time.monotonic(), 0.0
        while not self._closed.wait(_POLL_INTERVAL_S):
            now = time.monotonic()
            if now - last_poll > _MAX_POLL_DELAY_S:  # a machine that delayed this thread may have delayed the workers
                unreliable_until = now + (now - last_poll)
            last_poll = now
            if now - self._last_query_time > self._orphan_timeout_s:
                for rank in [rank for rank, health in self._worker_health.items() if health.phase != "idle"]:
                    self.kill(rank)
            with self._lock:
                readings = [heartbeat.read(rank) for rank, heartbeat in self._heartbeat_of_rank.items()]
                for health in readings:
                    if health.step_s is not None and self._last_timed_step.get(health.rank) != health.step:
                        self._last_timed_step[health.rank] = health.step
                        self._step_times.append(health.step_s)
                self._suspects = (
                    []
                    if now < unreliable_until
                    else find_suspects(readings, compute_timeouts(self._config, self._step_times))
                )
                self._worker_health = {health.rank: health for health in readings}
