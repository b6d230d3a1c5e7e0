"""Watches the workers of one node through shared memory, has them say where they are, and kills by pid.

In the driver's process for its own node, in an actor of its own on every other one: neither needs a worker's answer.
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
from raytrain_hpc.elastic.watchdog import Suspect, WorkerHealth, compute_timeouts, find_suspects
from raytrain_hpc.runtime.heartbeat import HeartbeatReader, set_thread_name

_POLL_INTERVAL_S = 0.05
_MAX_POLL_DELAY_S = 0.25  # between two looks: then nobody is accused for as long again
_STACKS_TIMEOUT_S = 0.1
_STEP_WINDOW = 32  # of which the median counts

HeartbeatPaths = Mapping[int, tuple[int, str]]  # rank -> pid, path of its heartbeat


@dataclass(frozen=True)
class NodeHealth:
    """What an agent saw last: who shows no life, and the signs of life of every rank of its node."""

    suspects: list[Suspect]
    workers: dict[int, WorkerHealth]


class NodeAgent:
    """Looks at its workers every 0.05 s; whoever asks hears what it found last."""

    def __init__(self, config: Config, orphan_timeout_s: float = inf):
        """`orphaned_s`: after so long without a question its workers are ended, as the others go on without them."""
        self._config, self._orphan_timeout_s, self._last_query_time = config, orphan_timeout_s, time.monotonic()
        self._heartbeat_of_pid: dict[int, HeartbeatReader] = {}  # by pid, opened once
        self._heartbeat_of_rank: dict[int, HeartbeatReader] = {}
        self._step_times: deque[float] = deque(maxlen=_STEP_WINDOW)
        self._last_timed_step: dict[int, int] = {}
        self._suspects: list[Suspect] = []
        self._worker_health: dict[int, WorkerHealth] = {}
        self._closed = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def watch(self, workers: HeartbeatPaths) -> None:
        """From now on these are the ranks of this node."""
        with self._lock:
            for pid, path in workers.values():
                if pid not in self._heartbeat_of_pid:
                    with contextlib.suppress(OSError):  # it has ended meanwhile, which is heard otherwise
                        self._heartbeat_of_pid[pid] = HeartbeatReader(pid, Path(path))
            self._heartbeat_of_rank = {
                rank: self._heartbeat_of_pid[pid] for rank, (pid, _) in workers.items() if pid in self._heartbeat_of_pid
            }
            self._suspects, self._worker_health = [], {}

    def look(self) -> NodeHealth:
        """Who shows no life, and what was seen of all."""
        self._last_query_time = time.monotonic()
        with self._lock:
            return NodeHealth(self._suspects, self._worker_health)

    def stacks(self) -> dict[int, str]:
        """What the threads of every rank of this node are at."""
        with self._lock:
            for pulse in self._heartbeat_of_rank.values():
                pulse.request_stacks()
            until = time.monotonic() + _STACKS_TIMEOUT_S
            return {rank: pulse.read_stacks(until) for rank, pulse in self._heartbeat_of_rank.items()}

    def kill(self, rank: int) -> None:
        """End a rank, frozen or not."""
        with self._lock:
            pulse = self._heartbeat_of_rank.pop(rank, None)
            self._suspects = [one for one in self._suspects if one.rank != rank]
        if pulse is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pulse.pid, signal.SIGKILL)

    def close(self) -> None:
        """Watch nobody any more."""
        self._closed.set()

    def _run(self) -> None:
        set_thread_name("watch")
        looked, trusting = time.monotonic(), 0.0
        while not self._closed.wait(_POLL_INTERVAL_S):
            now = time.monotonic()
            if now - looked > _MAX_POLL_DELAY_S:  # whatever held this thread up may have held up the workers, too
                trusting = now + (now - looked)
            looked = now
            if now - self._last_query_time > self._orphan_timeout_s:
                for rank in [rank for rank, one in self._worker_health.items() if one.phase != "idle"]:
                    self.kill(rank)
            with self._lock:
                signs = [pulse.read(rank) for rank, pulse in self._heartbeat_of_rank.items()]
                for one in signs:
                    if one.step_s is not None and self._last_timed_step.get(one.rank) != one.step:
                        self._last_timed_step[one.rank] = one.step
                        self._step_times.append(one.step_s)
                self._suspects = (
                    [] if now < trusting else find_suspects(signs, compute_timeouts(self._config, self._step_times))
                )
                self._worker_health = {one.rank: one for one in signs}
