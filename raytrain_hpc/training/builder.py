"""Builder of a trainer: groups, model, optimizer, state, snapshots, checkpoints and data of one rank, in that order."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import torch

from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.loader.block_stream import BlockSource, BlockStream
from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.data.loader.packing import build_packing
from raytrain_hpc.data.loader.stream import Stream
from raytrain_hpc.distributed.abort import CollectiveAbort
from raytrain_hpc.distributed.handshake import PeerInfo, exchange_peer_info
from raytrain_hpc.distributed.process_groups import ParallelContext, init_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.elastic.loss_spikes import WINDOW
from raytrain_hpc.elastic.state_partition import compute_state_partition
from raytrain_hpc.observability.profiler import StepProfiler
from raytrain_hpc.optim.offload import make_moment_storage
from raytrain_hpc.optim.optimizer import MOMENT_NAMES, Optimizer, get_local_slices
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.planner.layout import find_first_rank
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.runtime.fault_injection import FaultInjector
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.device_loader import DeviceLoader
from raytrain_hpc.training.evaluator import Evaluator
from raytrain_hpc.training.expert_bias import ExpertBias
from raytrain_hpc.training.loss_reduction import LossReducer
from raytrain_hpc.training.model_builder import (
    build_forward_backward,
    build_model,
    build_train_module,
    list_running_statistics,
)
from raytrain_hpc.training.model_update import ModelUpdate
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.snapshot_peers import SnapshotPeers
from raytrain_hpc.training.state_builder import (
    build_gradient_norm,
    build_state,
    list_persistent_buffers,
    measure_state_memory,
)
from raytrain_hpc.training.state_loader import CheckpointRollback, restore_state
from raytrain_hpc.training.step_guard import StepGuard
from raytrain_hpc.training.step_metrics import StepMetrics
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import TrainModule
from raytrain_hpc.training.trainer import PendingWork, Trainer


def build_trainer(
    spec: WorkerSpec,
    rank: int,
    device: torch.device,
    rendezvous: Rendezvous | None,
    control: ControlChannel,
    block_source: BlockSource | None = None,
    snapshot_store: SnapshotStore | None = None,
) -> Trainer:
    """Build the trainer of one rank in a generation, with its state loaded and equal on all replicas. Collective.

    `blocks`: data that other processes read; None reads it here. `snapshot_store`: snapshots that this process holds of
    earlier generations; those of this generation go there too. Raises StateLostError if no rank holds some part of the
    state to resume from, and ReplicaMismatchError if replicas differ after loading.
    """
    timestamps: Record = {"type": "ready", "rank": rank, "build_began": time.time()}
    config, run_dir = spec.config, Path(spec.config.run.dir)
    configure_torch(config, device)
    context = _init_groups(spec, rank, device, rendezvous)
    timestamps["groups"] = time.time()
    train_module = build_train_module(spec, context)
    model = build_model(train_module, spec, context)
    optimizer, recent_losses = _build_optimizer(model, spec, rank), _make_recent_losses(config, device)
    state, memory_state = build_state(model, optimizer, recent_losses), _get_memory_state(spec, snapshot_store)
    peers = SnapshotPeers(spec, rank, snapshot_store, device)
    peer_info = exchange_peer_info(
        state.to_index(), memory_state.to_index(), context, peers.handles
    )  # all groups exist
    store = CheckpointStore(run_dir / "checkpoints")
    restore_state(spec, context, state, memory_state, peer_info, store)
    replica_check = ReplicaCheck(state, context)
    replica_check.compare()
    snapshots = _build_snapshots(spec, model, state, optimizer, snapshot_store, peers, peer_info, control)
    checkpointer = _build_checkpointer(spec, state, peer_info, context, store, control)
    optimizer.release_memory()
    loader, eval_set = _build_loaders(spec, context, control, block_source)
    control.arm_abort(CollectiveAbort(peer_info.peer_sockets))
    control.emit(timestamps | {"model": time.time()})
    emit, timers = control.emit if rank == 0 else _ignore_record, PhaseTimer(device)
    model_step = build_forward_backward(train_module, model, spec, context, timers, control.emit)
    rollback = _build_rollback(spec, state, peer_info, context, store, checkpointer, optimizer)
    find_responsible_rank = partial(find_first_rank, spec.layout, spec.batching)
    return Trainer(
        config=config,
        loader=loader,
        model_step=model_step,
        loss_reducer=LossReducer(context, spec.batching),
        model_update=_build_model_update(spec, train_module, model, optimizer, peer_info, context),
        step_guard=StepGuard(config.fault, recent_losses, find_responsible_rank, rollback, emit),
        snapshots=snapshots,
        checkpointer=checkpointer,
        evaluator=None if eval_set is None else Evaluator(context, model_step, eval_set, control, timers),
        replica_check=replica_check,
        fault_injector=FaultInjector(config.fault.inject, rank, spec.layout.world_size, run_dir, train_module),
        metrics=StepMetrics(config, context, spec.generation, measure_state_memory(model, optimizer), timers, emit),
        timers=timers,
        profiler=StepProfiler(config.profiler, rank, run_dir),
        control=control,
        pending=PendingWork(spec.pending_eval_metrics, spec.has_pending_checkpoint),
    )


def preload_modules(config: Config) -> None:
    """Import the modules that a run of this kind needs beyond this one, which takes a second or more.

    Call when a worker starts: inside a generation the import would delay recovery.
    """
    if config.parallel.zero:
        import raytrain_hpc.parallel.fsdp
        import raytrain_hpc.state.dtensor  # noqa: F401


def configure_torch(config: Config, device: torch.device) -> None:
    """Set threads, determinism and device of this process. Call before any process group or tensor is created.

    Modules are imported first, because a module imported inside a generation would keep its process groups alive.
    """
    preload_modules(config)
    torch.set_num_threads(config.cluster.cpu_threads)
    is_deterministic = config.train.deterministic is not False
    if config.train.compile is True:
        torch.use_deterministic_algorithms(is_deterministic)  # the compiler reads it too; loads it, which takes seconds
    else:
        torch.set_deterministic_debug_mode("error" if is_deterministic else "default")
    if device.type == "cuda":
        if is_deterministic:  # read when the first cuBLAS handle is created; without it torch refuses cuBLAS
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.cuda.reset_peak_memory_stats(device)


def _init_groups(spec: WorkerSpec, rank: int, device: torch.device, rendezvous: Rendezvous | None) -> ParallelContext:
    has_tied_weights = spec.custom is None and spec.model_spec.tie_embeddings
    return init_process_groups(
        rendezvous, rank, spec.layout, device, tied_weights=has_tied_weights, balance_experts=_has_expert_bias(spec)
    )


def _has_expert_bias(spec: WorkerSpec) -> bool:
    return spec.custom is None and spec.model_spec.load_balancing == "bias"


def _build_optimizer(model: ParallelModel, spec: WorkerSpec, rank: int) -> Optimizer:
    config, parameters = spec.config, model.trainable_parameters
    moments = make_moment_storage(config, get_local_slices(parameters), MOMENT_NAMES[config.optimizer.name], rank)
    optimizer = Optimizer(parameters, config.optimizer, moments, elastic=config.train.deterministic == "elastic")
    optimizer.set_steps(spec.start_step)
    return optimizer


def _build_model_update(
    spec: WorkerSpec,
    train_module: TrainModule,
    model: ParallelModel,
    optimizer: Optimizer,
    peer_info: PeerInfo,
    context: ParallelContext,
) -> ModelUpdate:
    is_elastic = spec.config.train.deterministic == "elastic"
    biased_modules = model.modules.values() if _has_expert_bias(spec) else ()
    return ModelUpdate(
        optimizer,
        build_gradient_norm(model, peer_info.destination_indexes, context, exact=is_elastic),
        ExpertBias(biased_modules, spec.model_spec.expert_bias_rate, context.batch_group),
        list_running_statistics(train_module, model),
        spec.config.train.max_grad_norm,
        context.world_group,
    )


def _get_memory_state(spec: WorkerSpec, snapshot_store: SnapshotStore | None) -> ShardedState:
    """Return this process's snapshot of the step to resume from; empty if it has none."""
    if snapshot_store is None or spec.memory_step is None:
        return ShardedState()
    return snapshot_store.get_state(spec.memory_step)


def _make_recent_losses(config: Config, device: torch.device) -> torch.Tensor | None:
    """Return the window of recent losses that loss spikes are detected with; None if they are not."""
    if not config.fault.loss_spike_deviations:
        return None
    return torch.full((WINDOW,), torch.nan, dtype=torch.float64, device=device)


def _build_snapshots(
    spec: WorkerSpec,
    model: ParallelModel,
    state: ShardedState,
    optimizer: Optimizer,
    store: SnapshotStore | None,
    peers: SnapshotPeers,
    peer_info: PeerInfo,
    control: ControlChannel,
) -> SnapshotManager:
    # Buffers change in forward passes: with some, the live state between two steps is not that of a committed step.
    live_state_suffices = max(compute_state_partition(spec.layout)) == 0 and not list_persistent_buffers(model)
    replicator = peers.create_replicator(peer_info)
    release_memory = optimizer.release_memory
    snapshots = SnapshotManager(spec.config, store, state, live_state_suffices, replicator, release_memory)
    attached_snapshots = peers.attach_snapshots(peer_info, control.log)
    snapshots.begin_generation(spec.start_step, spec.generation, peers.own_snapshots, attached_snapshots)
    return snapshots


def _build_checkpointer(
    spec: WorkerSpec,
    state: ShardedState,
    peer_info: PeerInfo,
    context: ParallelContext,
    store: CheckpointStore,
    control: ControlChannel,
) -> Checkpointer:
    indexes = peer_info.destination_indexes
    return Checkpointer(
        state,
        indexes,
        context,
        store,
        spec.generation,
        spec.config.checkpoint,
        control.emit,
        last_time=spec.last_checkpoint_time,
    )


def _build_rollback(
    spec: WorkerSpec,
    state: ShardedState,
    peer_info: PeerInfo,
    context: ParallelContext,
    store: CheckpointStore,
    checkpointer: Checkpointer,
    optimizer: Optimizer,
) -> CheckpointRollback:
    return CheckpointRollback(
        store,
        context,
        state,
        peer_info.destination_indexes,
        checkpointer.get_last_due_step,
        checkpointer.finish,
        optimizer.release_memory,
    )


def _build_loaders(
    spec: WorkerSpec, context: ParallelContext, control: ControlChannel, blocks: BlockSource | None
) -> tuple[DeviceLoader, EvaluationSet | None]:
    """Return the loader of this rank's training microbatches, and the validation set if the dataset has one."""
    config, layout = spec.config, spec.layout
    dataset = spec.stream_spec.open_dataset()
    local_stream = spec.stream_spec.open_stream(dataset)
    stream: Stream = local_stream
    if blocks is not None:
        stream = BlockStream(local_stream, blocks, control.log if context.rank == 0 else _ignore_record)
    microbatches = spec.batching.split_by_rank(layout.dp_size)[layout.get_dp_rank(context.rank)]
    loader = DeviceLoader(stream, spec.batching, microbatches, context.device, config.data)
    if dataset.val is None:
        return loader, None
    packing = build_packing(config.data.packing, config.train.seq_len)
    return loader, EvaluationSet(dataset.val, packing, spec.batching.size, max_samples=config.eval.samples)


def _ignore_record(record: object) -> None:
    """Discard a record that rank 0 emits for all ranks."""
