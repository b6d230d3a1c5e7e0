"""The Ray actor around a worker: one a device. The only file of this room that imports Ray."""

from __future__ import annotations

import gc
import os
import socket
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from raytrain_hpc.distributed.flight_recorder import calls, start_recording
from raytrain_hpc.elastic.fault_attribution import peer_gone
from raytrain_hpc.errors import RaytrainError, StateLost
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.worker.malloc import share_one_arena

if TYPE_CHECKING:
    from raytrain_hpc.config.schema import Config
    from raytrain_hpc.distributed.rendezvous import Rendezvous
    from raytrain_hpc.elastic.fault_attribution import Call
    from raytrain_hpc.runtime.control_channel import Ended, Record
    from raytrain_hpc.runtime.worker_spec import WorkerSpec
    from raytrain_hpc.training.trainer import Outcome


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})  # type: ignore[call-overload]
class WorkerActor:
    """Runs the loop in its own thread of calls; the control group answers while the loop is busy."""

    def __init__(self, device: str, threads: int):
        began = time.time()
        share_one_arena()
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # whoever is given up on is the driver's to say
        start_recording()
        import torch

        import raytrain_hpc.training.factory  # noqa: F401  here, where no rank waits for another
        from raytrain_hpc.parallel.blocking_collectives import blocking_files
        from raytrain_hpc.runtime.control_channel import Control
        from raytrain_hpc.runtime.heartbeat import Heartbeat
        from raytrain_hpc.snapshot.memory_store import Snapshots

        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._heartbeat = Heartbeat(blocking_files())
        self._control, self._memory = Control(heartbeat=self._heartbeat), Snapshots()
        self._run_began_ns, self._rehearsed = time.time_ns(), False
        self._began, self._imported = began, time.time()

    def describe(self, config: Config, spec: WorkerSpec | None) -> dict[str, Any]:
        """Who and where this worker is; settles the network interface its collectives use, and is warm after it.

        `spec`: the generation behind which it has come up, to rehearse a step of.
        """
        import torch

        from raytrain_hpc.distributed.network_interface import interface_of
        from raytrain_hpc.distributed.process_groups import use_interface
        from raytrain_hpc.training.builder import set_kernels

        set_kernels(config, self._device)  # loads for seconds, which others would wait for later
        interface = config.cluster.interface
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        chosen = interface_of(address) if interface == "auto" else interface
        if chosen is not None:
            use_interface(chosen)
        if spec is not None:
            self.rehearse(spec)
        gc.freeze()  # what is there by now stays: only what generations make is to be looked through
        cuda = self._device.type == "cuda"
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "rack": ray.get_runtime_context().get_node_labels().get(config.cluster.rack_label, ""),
            "address": address,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": torch.cuda.get_device_name(self._device) if cuda else "cpu",
            "memory_gib": torch.cuda.get_device_properties(self._device).total_memory / 2**30 if cuda else None,
            "gpu_ids": ray.get_gpu_ids() if cuda else [],
            "pulse": str(self._heartbeat.path),
            "began": self._began,
            "imported": self._imported,
        }

    def rehearse(self, spec: WorkerSpec) -> None:
        """A step of a tiny model of this kind, once, behind what runs."""
        if not self._rehearsed:
            from raytrain_hpc.training.warmup import rehearse

            rehearse(spec, self._device)
            self._rehearsed = True

    def facts(self, path: str, mark: str) -> dict[str, Any]:
        """What this process finds on its machine; see worker.facts."""
        from raytrain_hpc.worker.host_info import facts

        return facts(self._device, path, mark)

    def collectives(self, rank: int, ranks: int, meeting: Rendezvous, sizes: list[int]) -> dict[str, dict[int, float]]:
        """Join a group of so many, and measure; see worker.collectives."""
        from raytrain_hpc.distributed.collective_bench import measure
        from raytrain_hpc.distributed.process_groups import join, leave

        join(meeting, rank, Layout(dp_replicate=ranks), self._device)
        try:
            return measure(sizes, self._device)
        finally:
            leave()

    def run(self, spec: WorkerSpec, rank: int, meeting: Rendezvous | None, feeder: Any = None) -> Ended:
        """One generation, on what the feeder hands out, if there is one. Whatever broke, it can go on to another.

        Raises what a user should see.
        """
        from raytrain_hpc.distributed.process_groups import leave
        from raytrain_hpc.distributed.replica_check import ReplicasDiffer
        from raytrain_hpc.runtime.control_channel import Ended

        self._run_began_ns = time.time_ns()
        self._control.begin()
        try:
            ended = Ended(self._train(spec, rank, meeting, feeder))
        except StateLost as error:
            ended = Ended("lost", str(error))
        except RaytrainError:
            raise
        except ReplicasDiffer as error:
            self._memory.distrust()
            ended = Ended("differs", str(error), differing=error.ranks if error.most else ())
        except Exception as error:  # most often a collective that broke because a peer is gone
            made = tuple(calls(self._run_began_ns))
            ended = Ended("broken", f"{type(error).__name__}: {error}".splitlines()[0], calls=made)
            if not peer_gone(ended.reason):
                traceback.print_exc()
        finally:
            self._control.disarm()
            leave()  # at once: it sets those free who wait for this rank
            self._control.mark("idle")
        self._memory.keep_lent()  # also of a run that is done: another rank may be lost while it saves
        memory = self._memory
        return replace(ended, steps=memory.steps, copies=memory.copies, taken_in=memory.generation)

    def _train(self, spec: WorkerSpec, rank: int, meeting: Rendezvous | None, feeder: Any) -> Outcome:
        from raytrain_hpc.training.factory import runner_of

        blocks = None
        if feeder is not None:
            from raytrain_hpc.data.loader.ray_loader import RayBlocks

            blocks = RayBlocks(feeder, spec.blocks, rank)
        runner = runner_of(spec, rank, self._device, meeting, self._control, blocks, self._memory)
        return runner.run(spec.first, spec.steps_to)

    @ray.method(concurrency_group="control")
    def drain(self) -> list[Record]:
        """Records made since the last call."""
        return self._control.drain()

    @ray.method(concurrency_group="control")
    def calls(self) -> list[Call]:
        """The collectives that this rank was last in, in this generation."""
        return calls(self._run_began_ns)

    @ray.method(concurrency_group="control")
    def recall(self, after: int) -> list[Record]:
        """The metrics of the steps after this one."""
        return self._control.recall(after)

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """The generation has fallen: end its collectives."""
        self._control.abort()

    @ray.method(concurrency_group="control")
    def request_pause(self) -> None:
        """End this generation after the current step."""
        self._control.request_pause()

    @ray.method(concurrency_group="control")
    def request_stop(self) -> None:
        """Save and stop after the current step."""
        self._control.request_stop()
