"""The Ray actor around a worker: one a device. The only file of this room that imports Ray."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

import ray

from raytrain_hpc.worker.allocator import share_one_arena

if TYPE_CHECKING:
    from raytrain_hpc.worker.control import Record
    from raytrain_hpc.worker.groups import Rendezvous
    from raytrain_hpc.worker.spec import WorkerSpec


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})  # type: ignore[call-overload]
class WorkerActor:
    """Runs the loop in its own thread of calls; the control group answers while the loop is busy."""

    def __init__(self, device: str, threads: int):
        began = time.time()
        share_one_arena()
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        import raytrain_hpc.worker.build  # noqa: F401  here, where no rank waits for another
        from raytrain_hpc.worker.control import Control

        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._control = Control()
        self._began, self._imported = began, time.time()

    def describe(self, interface: str) -> dict[str, Any]:
        """Who and where this worker is; settles the network interface its collectives use."""
        import torch

        from raytrain_hpc.worker.groups import use_interface
        from raytrain_hpc.worker.network import interface_of

        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        chosen = interface_of(address) if interface == "auto" else interface
        if chosen is not None:
            use_interface(chosen)
        cuda = self._device.type == "cuda"
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "address": address,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": torch.cuda.get_device_name(self._device) if cuda else "cpu",
            "memory_gib": torch.cuda.get_device_properties(self._device).total_memory / 2**30 if cuda else None,
            "gpu_ids": ray.get_gpu_ids() if cuda else [],
            "began": self._began,
            "imported": self._imported,
        }

    def run(self, spec: WorkerSpec, rank: int, meeting: Rendezvous | None, feeder: Any = None) -> str:
        """Train until done or stopped, on what the feeder hands out, if there is one. Returns which of the two."""
        from raytrain_hpc.worker.build import build_trainer
        from raytrain_hpc.worker.groups import leave

        blocks = None
        if feeder is not None:
            from raytrain_hpc.data.ray_feed import RayBlocks

            blocks = RayBlocks(feeder, spec.blocks, rank)
        trainer = build_trainer(spec, rank, self._device, meeting, self._control, blocks)
        outcome = trainer.run(spec.resume_step or 0, spec.steps_to)
        leave()
        return outcome

    @ray.method(concurrency_group="control")
    def drain(self) -> list[Record]:
        """Records made since the last call."""
        return self._control.drain()

    @ray.method(concurrency_group="control")
    def request_stop(self) -> None:
        """Save and stop after the current step."""
        self._control.request_stop()
