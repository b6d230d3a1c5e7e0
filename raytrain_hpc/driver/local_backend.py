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
from raytrain_hpc.driver.backend import RegroupRequest
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.hardware import find_device_preset
from raytrain_hpc.planner.topology import Node, Topology
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.training.factory import build_rank_trainer


class LocalWorkerGroup:
    """The same loop in the calling thread; records are handled as they are made."""

    def __init__(self, device: torch.device):
        self._device = device

    def start(self) -> None:
        """Nothing to start: the process is the caller's."""

    def wait_for_workers(self, count: int) -> None:
        """Nobody else will come."""

    def scale_up_to(self, count: int) -> None:
        """One process is one worker."""

    def list_candidates(self) -> list[Candidate]:
        """This process."""
        return [Candidate(0, "local", os.getpid())]

    def recall_metrics(self, after_step: int, until_step: int) -> list[dict[str, Any]]:
        """Nothing: records were handled as they were made."""
        return []

    def discard_state(self) -> None:
        """It holds nothing."""

    def set_members(self, members: tuple[int, ...]) -> list[dict[str, Any]]:
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

    def run_generation(
        self,
        spec: WorkerSpec,
        on_record: Callable[[dict[str, Any]], None],
        stop_event: threading.Event,
        poll_regroup: Callable[[], RegroupRequest],
    ) -> str:
        """Train until done or stopped. Returns which of the two."""
        control = DirectControlChannel(stop_event, on_record)
        return build_rank_trainer(spec, 0, self._device, None, control).run(spec.start_step, spec.end_step)

    def close(self) -> None:
        """Nothing to end: the process is the caller's."""


class LocalBackend:
    """A fleet of one."""

    world, is_external = 1, False

    def __init__(self, config: Config):
        wanted = config.cluster.device
        if wanted == "cuda" and not torch.cuda.is_available():
            raise ClusterError("cluster.device=cuda: this machine has no usable GPU; use cluster.device=cpu")
        use_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
        self._device = torch.device("cuda", 0) if use_cuda else torch.device("cpu")
        name = find_device_preset(torch.cuda.get_device_name(self._device)) if use_cuda else ""
        self.cluster = Topology((Node("local", "127.0.0.1", 1),), self._device.type, name)

    def create_worker_group(self, config: Config) -> LocalWorkerGroup:
        """The one worker."""
        return LocalWorkerGroup(self._device)


class DirectControlChannel(ControlChannel):
    """Hands every record over at once instead of keeping it for a driver to fetch."""

    def __init__(self, stop_event: threading.Event, on_record: Callable[[dict[str, Any]], None]):
        super().__init__(stop_event)
        self._on_record = on_record

    def emit(self, record: dict[str, Any]) -> None:
        """Handle the record now."""
        self._on_record(record)
