"""One rank in this process, with no Ray: for debuggers, and for machines without Ray."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.backend import Wish
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.hardware import device_called
from raytrain_hpc.planner.topology import Node, Topology
from raytrain_hpc.runtime.control_channel import Control
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.training.factory import runner_of


class LocalWorker:
    """The same loop in the calling thread; records are handled as they are made."""

    def __init__(self, device: torch.device):
        self._device = device

    def start(self) -> None:
        """Nothing to start: the process is the caller's."""

    def wait(self, count: int) -> None:
        """Nobody else will come."""

    def extend(self, count: int) -> None:
        """One process is one worker."""

    def candidates(self) -> list[Candidate]:
        """This process."""
        return [Candidate(0, "local", os.getpid())]

    def recall(self, after: int, until: int) -> list[dict[str, Any]]:
        """Nothing: records were handled as they were made."""
        return []

    def forget(self) -> None:
        """It holds nothing."""

    def arrange(self, members: tuple[int, ...]) -> list[dict[str, Any]]:
        """Who and where: this process."""
        cuda = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if cuda else "cpu"
        memory = torch.cuda.get_device_properties(self._device).total_memory / 2**30 if cuda else None
        host = socket.gethostname()
        now = time.time()
        return [
            {
                "rank": 0,
                "node": "local",
                "rack": "",
                "address": "127.0.0.1",
                "host": host,
                "pid": os.getpid(),
                "device": name,
                "memory_gib": memory,
                "began": now,
                "imported": now,
            }
        ]

    def run(
        self,
        spec: WorkerSpec,
        handle: Callable[[dict[str, Any]], None],
        stop: threading.Event,
        regroup: Callable[[], Wish],
    ) -> str:
        """Train until done or stopped. Returns which of the two."""
        control = HandlingControl(stop, handle)
        return runner_of(spec, 0, self._device, None, control).run(spec.first, spec.steps_to)

    def close(self) -> None:
        """Nothing to end: the process is the caller's."""


class LocalFleet:
    """A fleet of one."""

    world, lasting = 1, False

    def __init__(self, config: Config):
        wanted = config.cluster.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ClusterError("cluster.device=cuda: this machine has no usable GPU; use cluster.device=cpu")
        use_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
        self._device = torch.device("cuda", 0) if use_cuda else torch.device("cpu")
        name = device_called(torch.cuda.get_device_name(self._device)) if use_cuda else ""
        self.cluster = Topology((Node("local", "127.0.0.1", 1),), self._device.type, name)

    def crew(self, config: Config) -> LocalWorker:
        """The one worker."""
        return LocalWorker(self._device)


class HandlingControl(Control):
    """Hands every record over at once instead of keeping it for a driver to fetch."""

    def __init__(self, stop: threading.Event, handle: Callable[[dict[str, Any]], None]):
        super().__init__(stop)
        self._handle = handle

    def emit(self, record: dict[str, Any]) -> None:
        """Handle the record now."""
        self._handle(record)
