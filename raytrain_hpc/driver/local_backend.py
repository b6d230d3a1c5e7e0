"""Backend with one rank in this process, without Ray: for debugging, and for machines without Ray."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from raytrain_hpc.config.schema import Config
from raytrain_hpc.device_backends import is_accelerator_type
from raytrain_hpc.distributed.replica_check import CorruptionError
from raytrain_hpc.driver.backend import RegroupRequest, T
from raytrain_hpc.elastic.audit_verdict import CORRUPT
from raytrain_hpc.elastic.device_allocation import UNLIMITED, Allowance
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.errors import ClusterError, RunFailedError, WorkerFailedError
from raytrain_hpc.planner.hardware import find_device_preset
from raytrain_hpc.planner.topology import Node, Topology
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.torch_device import find_accelerator, get_device_name, get_memory_gib, has_bf16, is_accelerator
from raytrain_hpc.training.factory import build_rank_trainer
from raytrain_hpc.training.float8_support import list_without_float8
from raytrain_hpc.worker.host_info import describe_process

_NODE_ID = "local"


class LocalWorkerGroup:
    """Worker group of one rank, which trains in the calling thread. Records are handled when they are emitted."""

    def __init__(self, device: torch.device):
        self._device = device

    def start(self) -> None:
        """Do nothing: this process is the worker."""

    def wait_for_workers(self, count: int, timeout_s: float | None = None) -> None:
        """Raise ClusterError if `count` is more than one: no other worker can start in this process."""
        if count > 1:
            raise ClusterError(f"cluster.workers=0 trains in one process; {count} workers need a Ray cluster")

    def get_capacity(self) -> None:
        """Return None: there is no cluster to follow."""

    def get_allowance(self) -> Allowance:
        """Return an allowance without limit: there is no other run."""
        return UNLIMITED

    def scale_up_to(self, count: int, wanted: int | None = None) -> None:
        """Do nothing: one process is one worker."""

    def list_candidates(self) -> list[Candidate]:
        """Return this process as the only candidate, with no state in memory."""
        return [Candidate(0, _NODE_ID, os.getpid())]

    def list_held_parts(self) -> tuple[StatePart, ...]:
        """Return no parts: this process is the node."""
        return ()

    def recall_metrics(self, after_step: int, until_step: int) -> list[dict[str, Any]]:
        """Return no metrics: all records have been handled."""
        return []

    def call_on_nodes(self, function: Callable[[], T], timeout_s: float) -> dict[str, T]:
        """Call a function in this process, and return its result."""
        return {_NODE_ID: function()}

    def discard_state(self) -> None:
        """Do nothing: no state is kept between generations."""

    def set_members(self, members: tuple[int, ...]) -> list[dict[str, Any]]:
        """Return host and device facts of this process, which is rank 0."""
        host = socket.gethostname()
        now = time.time()
        return [
            {
                "rank": 0,
                "node": host,
                "node_id": _NODE_ID,
                "rack": "",
                "address": "127.0.0.1",
                "host": host,
                "pid": os.getpid(),
                "device": get_device_name(self._device),
                "memory_gib": get_memory_gib(self._device),
                "began": now,
                "imported": now,
                **describe_process(),
            }
        ]

    def run_generation(
        self,
        spec: WorkerSpec,
        on_record: Callable[[dict[str, Any]], None],
        stop_event: threading.Event,
        poll_regroup: Callable[[], RegroupRequest],
    ) -> str:
        """Train in the calling thread until done or stopped, and return the outcome. `poll_regroup` is not called.

        Raises WorkerFailedError if the state in memory is wrong: that of a checkpoint replaces it. Raises
        RunFailedError if the process computes something wrong again and again: it cannot replace itself.
        """
        channel = DirectControlChannel(stop_event, on_record)
        try:
            return build_rank_trainer(spec, 0, self._device, None, channel).run(spec.start_step, spec.end_step)
        except CorruptionError as error:
            if error.kind == CORRUPT:
                place = socket.gethostname(), os.getpid()
                raise WorkerFailedError(
                    0, *place, CORRUPT, str(error), node_id=_NODE_ID, detected_at=time.time()
                ) from None
            raise RunFailedError(f"{error}; use another device") from error

    def close(self) -> None:
        """Do nothing: the process belongs to the caller."""


class LocalBackend:
    """Backend for one worker, in this process."""

    world_size, follows_cluster, uses_existing_cluster = 1, False, False

    def __init__(self, config: Config):
        self._device = _choose_device(config.cluster.device)
        nodes, device = (Node(_NODE_ID, "127.0.0.1", 1),), self._device
        preset = find_device_preset(get_device_name(device)) if is_accelerator(device) else ""
        self.cluster = Topology(nodes, device.type, preset, has_bf16(device), list_without_float8(device))

    def create_worker_group(self, config: Config) -> LocalWorkerGroup:
        """Create the worker group of one rank."""
        return LocalWorkerGroup(self._device)


def _choose_device(requested: str) -> torch.device:
    """Return the device of this process. `requested`: cluster.device. Raises ClusterError if there is none such."""
    if requested == "cpu":
        return torch.device("cpu")
    accelerator = find_accelerator()
    if is_accelerator_type(requested) and (accelerator is None or accelerator.type != requested):
        raise ClusterError(f"cluster.device={requested}: this machine has no usable GPU; use cluster.device=cpu")
    return torch.device("cpu") if accelerator is None else accelerator


class DirectControlChannel(ControlChannel):
    """Control channel that passes each record to a handler at once, instead of queueing it for the driver."""

    def __init__(self, stop_event: threading.Event, on_record: Callable[[dict[str, Any]], None]):
        super().__init__(stop_event)
        self._on_record, self._emit_lock = on_record, threading.RLock()

    def emit(self, record: dict[str, Any]) -> None:
        """Pass the record to the handler, one at a time: checkpoints are written, and reported, in a thread."""
        with self._emit_lock:
            self._on_record(record)
