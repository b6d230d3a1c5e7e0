"""Agent of one node: it watches the workers through shared memory, collects their stacks, and kills them by pid.

It holds their snapshots open, so that these outlive them.

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
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import NamedTuple

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.device_monitor import DeviceMonitor
from raytrain_hpc.driver.held_memory import HeldMemory, HeldSnapshot
from raytrain_hpc.driver.preemption_notice import PreemptionNotice
from raytrain_hpc.elastic.death_report import DeathReport, explain_death
from raytrain_hpc.elastic.watchdog import Suspect, WorkerHealth, compute_timeouts, find_suspects
from raytrain_hpc.nvml import GpuHealth
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.runtime.heartbeat import HeartbeatReader, set_thread_name

_POLL_INTERVAL_S = 0.05
_MAX_POLL_DELAY_S = 0.25  # after a longer gap between two polls, report no suspects for as long again
_STACKS_TIMEOUT_S = 0.1
_STEP_WINDOW = 32  # number of step times over which the median is taken

_VMSTAT = Path("/proc/vmstat")


class WatchedProcess(NamedTuple):
    """The process of a rank. `pulse`: path of its heartbeat file. `pci_address`: of its GPU, if it has one."""

    pid: int
    pulse: str
    pci_address: str = ""


WatchedRanks = Mapping[int, WatchedProcess]


@dataclass(frozen=True)
class NodeHealth:
    """The last reading of an agent: unresponsive ranks, and the health of every rank of its node.

    `is_preempted`: the node's cloud has announced that it will be reclaimed. `devices`: health of their GPUs by rank,
    where it is known.
    """

    suspects: list[Suspect]
    workers: dict[int, WorkerHealth]
    is_preempted: bool = False
    devices: dict[int, GpuHealth] = field(default_factory=dict)


class NodeAgent:
    """Watcher of the workers of one node. A thread polls their heartbeats every 0.05 s."""

    def __init__(self, config: Config, orphan_timeout_s: float = inf):
        """Start the polling thread.

        If no request arrives for `orphan_timeout_s`, the workers are killed: the run continues without this node.
        """
        self._config, self._orphan_timeout_s, self._last_query_time = config, orphan_timeout_s, time.monotonic()
        self._heartbeat_of_pid: dict[int, HeartbeatReader] = {}  # of running processes: each file is opened once
        self._heartbeat_of_rank: dict[int, HeartbeatReader] = {}
        self._step_times: deque[float] = deque(maxlen=_STEP_WINDOW)
        self._last_timed_step: dict[int, int] = {}
        self._suspects: list[Suspect] = []
        self._worker_health: dict[int, WorkerHealth] = {}
        self._closed, self._first_oom_kills = threading.Event(), _count_oom_kills()
        self._notice, self._held, self._devices = PreemptionNotice(config), HeldMemory(), DeviceMonitor()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def watch(self, workers: WatchedRanks, memory_step: int | None = None) -> None:
        """Replace the ranks of this node that are watched, at the start of a generation.

        `memory_step`: the step that the generation restores from memory. Snapshots of other steps are released, or all
        if there is none, or no rank here.
        """
        with self._lock:
            if memory_step is None or not workers:
                self._held.clear()
            else:
                self._held.keep_step(memory_step)
            self._heartbeat_of_pid = {
                pid: heartbeat for pid, heartbeat in self._heartbeat_of_pid.items() if heartbeat.read(0).is_alive
            }
            for process in workers.values():
                if process.pid not in self._heartbeat_of_pid:
                    with contextlib.suppress(OSError):  # it has ended, which Ray reports
                        self._heartbeat_of_pid[process.pid] = HeartbeatReader(process.pid, Path(process.pulse))
            self._heartbeat_of_rank = {
                rank: self._heartbeat_of_pid[process.pid]
                for rank, process in workers.items()
                if process.pid in self._heartbeat_of_pid
            }
            self._suspects, self._worker_health = [], {}
            self._first_oom_kills = _count_oom_kills()
        self._devices.watch({rank: process.pci_address for rank, process in workers.items() if process.pci_address})

    def get_health(self) -> NodeHealth:
        """Return the last reading. It also tells the agent that the driver still polls it."""
        self._last_query_time = time.monotonic()
        with self._lock:
            return NodeHealth(
                self._suspects, self._worker_health, self._notice.is_announced, self._devices.get_health()
            )

    def collect_stacks(self) -> dict[int, str]:
        """Return the thread stacks of every watched rank; empty or partial after 0.1 s."""
        with self._lock:
            for heartbeat in self._heartbeat_of_rank.values():
                heartbeat.request_stacks()
            deadline = time.monotonic() + _STACKS_TIMEOUT_S
            return {rank: heartbeat.read_stacks(deadline) for rank, heartbeat in self._heartbeat_of_rank.items()}

    def explain_deaths(self) -> dict[int, DeathReport]:
        """Return why watched ranks have died, of those whose death this node can explain."""
        with self._lock:
            oom_kills = max(0, _count_oom_kills() - self._first_oom_kills)  # unknown if they cannot be read
            reports = {
                rank: explain_death(rank, heartbeat.read_last_output(), oom_kills)
                for rank, heartbeat in self._heartbeat_of_rank.items()
                if not heartbeat.read(rank).is_alive
            }
        return {rank: report for rank, report in reports.items() if report is not None}

    def list_snapshots(self) -> list[HeldSnapshot]:
        """Return the complete snapshots of ranks of this node, also of those whose processes have ended."""
        with self._lock:
            return self._held.list_snapshots()

    def recall_metrics(self, after_step: int) -> list[tuple[int, Record]]:
        """Return the metrics of the steps after `after_step` that rank 0 has kept on this node, with generations."""
        with self._lock:
            return self._held.recall_metrics(after_step)

    def kill(self, rank: int) -> None:
        """Send SIGKILL to the process of a rank, which also ends a frozen one, and stop watching it."""
        with self._lock:
            heartbeat = self._heartbeat_of_rank.pop(rank, None)
            self._suspects = [suspect for suspect in self._suspects if suspect.rank != rank]
        if heartbeat is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(heartbeat.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop the polling threads, and release the memory of workers."""
        self._closed.set()
        self._notice.close()
        self._devices.close()
        with self._lock:
            self._held.clear()

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
                if not self._closed.is_set():
                    self._held.update({h.pid: h.read_memory() for h in self._heartbeat_of_rank.values()})


def _count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, of the node or of a cgroup; 0 if unknown."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
