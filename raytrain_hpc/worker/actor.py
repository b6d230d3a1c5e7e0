"""The Ray actor of a worker, one per device. This is the only file of the package that imports Ray."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from raytrain_hpc.cpu_limits import keep_cpu_count
from raytrain_hpc.device_backends import set_network_interface, set_worker_environment
from raytrain_hpc.distributed.flight_recorder import enable_flight_recorder, read_calls
from raytrain_hpc.errors import CheckpointCorruptedError, RaytrainError, StateLostError
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.worker.malloc import use_single_malloc_arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from raytrain_hpc.config.schema import Config
    from raytrain_hpc.data.samples.sample_dataset import SampleDataset
    from raytrain_hpc.distributed.rendezvous import Rendezvous
    from raytrain_hpc.elastic.fault_attribution import CollectiveCall
    from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit
    from raytrain_hpc.runtime.audit_sample import AuditSample, Traces
    from raytrain_hpc.runtime.control_channel import GenerationOutcome, Record, RequestKind
    from raytrain_hpc.runtime.worker_spec import WorkerSpec
    from raytrain_hpc.training.step_completion import TrainOutcome


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1, "samples": 1, "health": 1})  # type: ignore[call-overload]
class WorkerActor:
    """Actor that runs generations, one at a time.

    Methods of the group "control" answer while a generation runs, and at once, since those that move much data are in
    the group "samples", and `hold` is in a group of its own.
    """

    def __init__(self, device: str, threads: int):
        """Import what a rank needs and start the heartbeat."""
        start = time.time()
        if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []):
            # Blocked in all processes of a Ray that was started for the run. Here it has no effect, and `describe`
            # unblocks it: processes that the user's code starts inherit that, and must be possible to terminate.
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        use_single_malloc_arena()
        os.environ["OMP_NUM_THREADS"] = str(threads)
        set_worker_environment(os.environ)
        enable_flight_recorder()
        import raytrain_hpc.training.factory  # noqa: F401  import it before ranks wait for each other
        from raytrain_hpc.parallel.blocking_collectives import get_blocking_files
        from raytrain_hpc.runtime.control_channel import ControlChannel
        from raytrain_hpc.runtime.heartbeat import Heartbeat
        from raytrain_hpc.snapshot.memory_store import SnapshotStore
        from raytrain_hpc.torch_device import get_first_device, restrict_visible_devices

        self._device = get_first_device(device)
        restrict_visible_devices(self._device, ray.get_gpu_ids())
        self._heartbeat = Heartbeat(get_blocking_files())
        self._control, self._snapshots = ControlChannel(heartbeat=self._heartbeat), SnapshotStore()
        self._run_start_ns, self._is_warmed_up = time.time_ns(), False
        self._cancelled_warmup = -1  # generation
        self._dataset: SampleDataset | None = None
        self._start_unix, self._imported_unix = start, time.time()

    def describe(self, config: Config, spec: WorkerSpec | None) -> dict[str, Any]:
        """Finish the setup of this process, and return its host and device facts. Call once, before `run`.

        It chooses the network interface for collectives. If `spec` is given, it also warms up with a step for that
        generation.
        """
        from raytrain_hpc.checkpoint.local_directory import has_local_files
        from raytrain_hpc.distributed.network_interface import choose_interface
        from raytrain_hpc.nvml import find_nvlink_domain
        from raytrain_hpc.torch_device import get_device_name, get_memory_gib, get_pci_address, is_accelerator
        from raytrain_hpc.training.builder import configure_torch
        from raytrain_hpc.worker.host_info import describe_process
        from raytrain_hpc.worker.host_topology import bind_to_numa_node, find_numa_node, find_switch

        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # of the thread that runs generations
        configure_torch(config, self._device)  # takes seconds, for which other ranks would wait later
        numa_node = find_numa_node(pci_address) if (pci_address := get_pci_address(self._device)) else None
        keep_cpu_count(os.environ)
        is_bound = config.cluster.numa_binding and numa_node is not None and bind_to_numa_node(numa_node)
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        if (interface := choose_interface(config, address)) is not None:
            set_network_interface(interface, os.environ)
        if spec is not None:
            self._run_warmup_step(spec)
        labels = ray.get_runtime_context().get_node_labels()
        gc.freeze()  # these objects stay: spare later garbage collections from scanning them
        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "rack": labels.get(config.cluster.rack_label) or find_switch(os.environ) or find_nvlink_domain(pci_address),
            "address": address,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": get_device_name(self._device),
            "memory_gib": get_memory_gib(self._device),
            "pci_address": pci_address,
            "numa_node": numa_node,
            "is_bound": is_bound,
            "gpu_ids": ray.get_gpu_ids() if is_accelerator(self._device) else [],
            "pulse": str(self._heartbeat.path),
            "has_local_files": has_local_files(config),
            "began": self._start_unix,
            "imported": self._imported_unix,
            **describe_process(),
        }

    def warm_up(self, spec: WorkerSpec) -> str:
        """Do in advance, as a spare, what the first step as a rank of a generation would do first.

        Trains a tiny model for one step, once, and compiles what the ranks of this generation run compiled, until
        `cancel_warmup`. Returns why it failed, or "".
        """
        from raytrain_hpc.training.compile_warmup import can_warm_up_compiler, warm_up_compiler

        try:
            self._run_warmup_step(spec)
            if can_warm_up_compiler(spec := self._resolve_dataset(spec)):
                warm_up_compiler(spec, self._device, lambda: spec.generation <= self._cancelled_warmup)
        except Exception as error:  # of any kind: the worker can train anyway
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def _run_warmup_step(self, spec: WorkerSpec) -> None:
        """Fetch the user's dataset, or train a tiny model of the same kind for one step, to load libraries and kernels.

        Later calls do nothing.
        """
        if not self._is_warmed_up:
            from raytrain_hpc.training.warmup import run_warmup_step

            run_warmup_step(self._resolve_dataset(spec), self._device)
            self._is_warmed_up = True

    def audit(
        self,
        spec: WorkerSpec,
        audit: SpareAudit,
        rank: int,
        rendezvous: Rendezvous | None,
        batch: bytes,
        indexes: list[dict[str, Any]],
        blocks: list[Any],
    ) -> Traces | None:
        """Compute a microbatch of a step again, as a spare, and return its traces; None if `cancel_warmup` ended it.

        `rank`: among the spares of the audit. `indexes`, `blocks`: the weights, by source; references to the blocks.
        See `training.spare_audit.compute_again`.
        """
        from raytrain_hpc.distributed.process_groups import destroy_process_groups
        from raytrain_hpc.training.spare_audit import AuditCancelledError, compute_again

        spec, weights = self._resolve_dataset(spec), list(zip(indexes, ray.get(blocks), strict=True))
        try:
            return compute_again(
                *(spec, audit, rank, self._device, rendezvous, weights, batch),
                lambda: spec.generation <= self._cancelled_warmup,
            )
        except AuditCancelledError:
            return None
        finally:
            destroy_process_groups()

    def collect_host_info(self, path: str, marker: str, driver: tuple[str, int]) -> dict[str, Any]:
        """Return facts about this process and its host; see `worker.host_info`."""
        from raytrain_hpc.worker.host_info import collect_host_info

        return collect_host_info(self._device, path, marker, driver)

    def measure_collectives(
        self, rank: int, world_size: int, rendezvous: Rendezvous, sizes: list[int]
    ) -> dict[str, dict[int, float]]:
        """Measure collectives for each message size in bytes, as one rank of a process group of its own.

        Returns operation -> bytes -> seconds; see `distributed.collective_bench`.
        """
        from raytrain_hpc.distributed.collective_bench import measure_collectives
        from raytrain_hpc.distributed.process_groups import destroy_process_groups, init_process_groups

        init_process_groups(rendezvous, rank, Layout(dp_replicate=world_size), self._device)
        try:
            return measure_collectives(sizes, self._device)
        finally:
            destroy_process_groups()

    def run(self, spec: WorkerSpec, rank: int, rendezvous: Rendezvous | None, feeder: Any = None) -> GenerationOutcome:
        """Run one generation as `rank`, and return how it ended. The actor can then run another generation.

        `feeder`: the actor that delivers training data, if any. Raises RaytrainError for an error that ends the run.
        """
        from raytrain_hpc.distributed.process_groups import destroy_process_groups
        from raytrain_hpc.distributed.replica_check import CorruptionError
        from raytrain_hpc.runtime.control_channel import GenerationOutcome
        from raytrain_hpc.worker.error_report import describe_error

        self._run_start_ns = time.time_ns()
        self._control.begin_generation(spec.generation)
        try:
            outcome = GenerationOutcome(self._train(spec, rank, rendezvous, feeder))
        except StateLostError as error:
            outcome = GenerationOutcome("lost", str(error))
        except CheckpointCorruptedError as error:  # not raised: its traceback would keep the process groups alive
            outcome = GenerationOutcome("damaged", str(error))
        except RaytrainError:
            raise
        except CorruptionError as error:
            self._snapshots.discard_unverified()
            outcome = GenerationOutcome(
                "differs",
                str(error),
                divergent_ranks=error.corrupt_ranks,
                divergence=error.kind,
                suspects=error.suspects,
            )
        except Exception as error:  # usually a collective that failed because a peer was lost
            recent_calls, report = tuple(read_calls(self._run_start_ns)), describe_error(error)
            outcome = GenerationOutcome(
                "broken",
                report.reason,
                calls=recent_calls,
                traceback=report.traceback,
                is_program_error=report.is_program_error,
            )
        finally:
            self._control.disarm_abort()
            destroy_process_groups()  # at once, to release the ranks that wait for this one
            self._control.set_phase("idle")
            self._control.samples.clear()
        self._control.set_phase("saving")  # gigabytes of state may be copied
        self._snapshots.copy_live()  # even if done: another rank may fail while it saves
        self._control.set_phase("idle")
        snapshots = self._snapshots
        return replace(
            outcome,
            steps=snapshots.steps,
            replica_steps=snapshots.replica_steps,
            verified_step=snapshots.verified_step,
            snapshot_generation=snapshots.generation,
        )

    def _train(self, spec: WorkerSpec, rank: int, rendezvous: Rendezvous | None, feeder: Any) -> TrainOutcome:
        """Build the rank and train it up to the last step of `spec`."""
        from raytrain_hpc.training.factory import build_rank_trainer

        blocks = None
        if feeder is not None:
            from raytrain_hpc.data.loader.ray_loader import RayBlockSource

            blocks = RayBlockSource(feeder, spec.block_plan, rank)
        spec = self._resolve_dataset(spec)
        runner = build_rank_trainer(spec, rank, self._device, rendezvous, self._control, blocks, self._snapshots)
        return runner.run(spec.start_step, spec.end_step)

    def _resolve_dataset(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the spec with the dataset that it refers to, if any. A map-style one is read once per process.

        Arrays in the dataset are those of the object store, not copies.
        """
        from raytrain_hpc.runtime.worker_spec import CustomModel, DatasetReference

        custom = spec.custom
        if not isinstance(custom, CustomModel) or not isinstance(custom.dataset, DatasetReference):
            return spec
        if self._dataset is None or self._dataset.form != "map":  # a stream has a position: begin with another copy
            self._dataset = ray.get(custom.dataset.object_ref)
        return replace(spec, custom=replace(custom, dataset=self._dataset))

    def call(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function, called in this process between two generations."""
        return function()

    @ray.method(concurrency_group="health")
    def hold(self, seconds: float) -> None:
        """Return after some seconds. To the caller, the call fails as soon as this process ends."""
        time.sleep(seconds)

    @ray.method(concurrency_group="control")
    def drain(self) -> list[Record]:
        """Return the records emitted since the last call."""
        return self._control.drain()

    @ray.method(concurrency_group="control")
    def recent_calls(self) -> list[CollectiveCall]:
        """Return the last collectives of this rank in this generation."""
        return read_calls(self._run_start_ns)

    @ray.method(concurrency_group="control")
    def count_link_timeouts(self) -> dict[int, int]:
        """Return for each peer how often in a row packets to it were repeated because nothing was acknowledged."""
        return self._control.count_link_timeouts()

    @ray.method(concurrency_group="control")
    def recall(self, after_step: int) -> list[Record]:
        """Return the metrics of the steps after `after_step` that are still in memory."""
        return self._control.recall_metrics(after_step)

    @ray.method(concurrency_group="samples", num_returns=2)
    def take_sample(self) -> tuple[AuditSample | None, Any]:
        """Return the sample for audits by spares, and its weights; see `SampleStore.take`."""
        return self._control.samples.take()

    @ray.method(concurrency_group="samples")
    def clear_sample(self, next_step: int) -> None:
        """Drop the sample, and take the next one from this step on; see `SampleStore.clear`."""
        self._control.samples.clear(next_step)

    @ray.method(concurrency_group="control")
    def cancel_warmup(self, generation: int) -> None:
        """Cut a warm-up or audit of this generation short: the worker becomes a rank. Works before its start too."""
        self._cancelled_warmup = generation

    @ray.method(concurrency_group="control")
    def abort(self) -> None:
        """Abort the collectives of this rank, because the generation has failed."""
        self._control.abort()

    @ray.method(concurrency_group="control")
    def request(self, kind: RequestKind, generation: int) -> None:
        """End a generation after the current step; see `ControlChannel.request`."""
        self._control.request(kind, generation)
