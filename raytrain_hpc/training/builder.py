"""Builder of a trainer: groups, model, optimizer, state, snapshots, checkpoints and data of one rank, in that order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import Config
from raytrain_hpc.config.training_config import OPTIMIZER_NAMES
from raytrain_hpc.data.dataset.sources import Dataset
from raytrain_hpc.data.loader.block_stream import BlockSource
from raytrain_hpc.data.samples.sample_dataset import SampleDataset
from raytrain_hpc.distributed.abort import CollectiveAbort
from raytrain_hpc.distributed.handshake import PeerInfo, exchange_peer_info
from raytrain_hpc.distributed.process_groups import GroupOptions, ParallelContext, init_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.elastic.loss_spikes import WINDOW
from raytrain_hpc.elastic.state_partition import compute_state_partition
from raytrain_hpc.optim.lr_scheduler import LearningRate
from raytrain_hpc.optim.optimizer import Optimizer
from raytrain_hpc.optim.optimizer_class import check_optimizer_class
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.planner.hardware_defaults import check_float8
from raytrain_hpc.planner.layout import find_first_rank
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.runtime.phase_durations import PhaseDurations
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.storage.location import parse_location
from raytrain_hpc.torch_device import set_device
from raytrain_hpc.torch_private import load_dynamo, load_symbolic_shapes
from raytrain_hpc.training.attention_kernel import configure_attention, log_attention_kernel
from raytrain_hpc.training.audit_callbacks import build_audit_callbacks
from raytrain_hpc.training.callback_builder import add_common_callbacks, build_callback_list, start_callbacks
from raytrain_hpc.training.callback_list import CallbackList
from raytrain_hpc.training.callback_state import CallbackState
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.data_builder import build_evaluator, build_loader, list_eval_metrics, open_data
from raytrain_hpc.training.evaluator import Evaluator
from raytrain_hpc.training.expert_bias import ExpertBias
from raytrain_hpc.training.float8_support import list_without_float8
from raytrain_hpc.training.loss_reduction import LossReducer
from raytrain_hpc.training.model_builder import (
    build_forward_backward,
    build_model,
    build_running_statistics,
    build_train_module,
)
from raytrain_hpc.training.model_update import ModelUpdate
from raytrain_hpc.training.optimizer_builder import build_optimizer, check_group_patterns, connect_optimizer
from raytrain_hpc.training.running_statistics import RunningStatistics
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.snapshot_peers import SnapshotPeers
from raytrain_hpc.training.state_builder import (
    build_gradient_norm,
    build_state,
    list_persistent_buffers,
    measure_state_memory,
)
from raytrain_hpc.training.state_loader import CheckpointRollback, get_source_state, restore_state
from raytrain_hpc.training.step_audits import StepAudits, build_audits
from raytrain_hpc.training.step_callbacks import EvaluationSchedule, RankStatistics
from raytrain_hpc.training.step_completion import StepCompletion
from raytrain_hpc.training.step_guard import StepGuard
from raytrain_hpc.training.step_metrics import StepMetrics
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.trainer import PendingWork, Trainer
from raytrain_hpc.training.weight_exchange import WeightExchange

_COPY_TIMEOUT_S = 24 * 3600.0


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

    `block_source`: data that other processes read; None reads it here. `snapshot_store`: snapshots of earlier
    generations in this process; those of this one go there too. Raises StateLostError if no rank holds some part of the
    state to resume from, and ReplicaMismatchError if replicas differ after loading.
    """
    durations = PhaseDurations()
    configure_torch(spec.config, device)
    control.arm_abort(CollectiveAbort({}))  # ends a copy of the dataset
    dataset = open_data(spec, control)  # before the others wait in collectives: it may be copied for long
    durations.end("data")
    context = _init_groups(spec, rank, device, rendezvous, control)
    control.arm_abort(CollectiveAbort({}))  # those of devices; sockets of others are not known yet
    durations.end("communicator")
    if spec.custom is None:
        log_attention_kernel(spec.model_spec, spec.config.train, device)
    callbacks = build_callback_list(spec, context, control, eval_metrics=list_eval_metrics(dataset))
    with callbacks.close_on_error():
        return _build_with_callbacks(
            spec, context, control, dataset, callbacks, durations, block_source, snapshot_store
        )


def _build_with_callbacks(
    spec: WorkerSpec,
    context: ParallelContext,
    control: ControlChannel,
    dataset: Dataset | SampleDataset,
    callbacks: CallbackList,
    durations: PhaseDurations,
    block_source: BlockSource | None,
    snapshot_store: SnapshotStore | None,
) -> Trainer:
    """Build the trainer in the process groups of `context`. Arguments as of `build_trainer`."""
    train_module = build_train_module(spec, context, control.log)
    model = build_model(train_module, spec, context)
    optimizer = build_optimizer(model, spec, context.rank)
    recent_losses = _make_recent_losses(spec.config, context.device)
    durations.end("state")
    loader = build_loader(spec, dataset, context, block_source, control)
    durations.end("data")
    callback_state = start_callbacks(callbacks, loader, model, optimizer)
    state = build_state(model, optimizer, recent_losses, callback_state.list_shards())
    peers, peer_info, store = _restore_state(spec, context, state, callback_state, snapshot_store)
    replica_check = ReplicaCheck(state, context, callback_state.list_replicated())
    replica_check.compare()
    snapshots = _build_snapshots(spec, model, state, optimizer, snapshot_store, peers, peer_info, control)
    checkpointer = Checkpointer(state, peer_info.destination_indexes, context, store, spec, control.emit)
    optimizer.release_memory()
    control.arm_abort(CollectiveAbort(peer_info.peer_sockets))
    durations.end("state")
    control.emit(durations.to_ready_record(context.rank))
    timers, emit = PhaseTimer(context.device), control.emit if context.rank == 0 else _ignore_record
    running_statistics = build_running_statistics(train_module, model, spec, context)
    model_step = build_forward_backward(train_module, model, spec, context, timers, running_statistics, control.emit)
    evaluator = build_evaluator(spec, dataset, context, model_step, control, timers)
    model_update = _build_model_update(spec, model, optimizer, peer_info, context, running_statistics)
    audits = build_audits(spec, context, model, model_step, model_update, loader, state, peer_info, control, emit)
    checks = replica_check, snapshots.mark_verified if audits is None else _ignore_record
    add_common_callbacks(callbacks, spec, train_module, state, *checks, control, context.tracer, optimizer.update_hooks)
    exchange = WeightExchange(callbacks.context, model, state, callback_state, snapshots, checkpointer)
    callbacks.context.exchange_weights = exchange
    callbacks.add(*_build_trainer_callbacks(spec, model, context, evaluator, audits))
    callbacks.add(*build_audit_callbacks(audits, spec, replica_check, snapshots, checkpointer, emit))
    rollback = _build_rollback(spec, state, peer_info, context, store, checkpointer, optimizer, callback_state)
    return Trainer(
        spec.config,
        loader,
        model_step,
        LossReducer(context, spec.batching),
        model_update,
        _build_step_guard(spec, recent_losses, rollback, emit),
        snapshots,
        checkpointer,
        callbacks,
        callback_state,
        StepCompletion(callbacks, callback_state, checkpointer, evaluator, optimizer, control, exchange.undo),
        _build_metrics(spec, model, optimizer, context, timers, emit),
        timers,
        control,
        _get_pending_work(spec),
        audits,
    )


def _restore_state(
    spec: WorkerSpec,
    context: ParallelContext,
    state: ShardedState,
    callback_state: CallbackState,
    snapshot_store: SnapshotStore | None,
) -> tuple[SnapshotPeers, PeerInfo, CheckpointStore]:
    """Fill the state, and return the peers of its snapshots, the indexes of all ranks, and the checkpoints."""
    source_state = get_source_state(spec, context.rank, snapshot_store)
    index = state.to_index()
    peers = SnapshotPeers(spec, context.rank, snapshot_store, context.device, index)
    # All groups exist.
    peer_info = exchange_peer_info(index, source_state.to_index(), context, peers.handles)
    store = CheckpointStore(parse_location(spec.config.run.dir) / "checkpoints")
    peer_info = callback_state.agree_on_sources(source_state, peer_info, context.world_group)
    restore_state(spec, context, state, source_state, peer_info, store)
    callback_state.sync(context.world_group, context.device)
    callback_state.restore()
    return peers, peer_info, store


def _build_step_guard(
    spec: WorkerSpec,
    recent_losses: torch.Tensor | None,
    rollback: CheckpointRollback,
    emit: Callable[[Record], None],
) -> StepGuard:
    find_responsible_rank = partial(find_first_rank, spec.layout, spec.batching)
    return StepGuard(spec.config.fault, recent_losses, find_responsible_rank, rollback, emit)


def _build_metrics(
    spec: WorkerSpec,
    model: ParallelModel,
    optimizer: Optimizer,
    context: ParallelContext,
    timers: PhaseTimer,
    emit: Callable[[Record], None],
) -> StepMetrics:
    state_memory = measure_state_memory(model, optimizer)
    is_partitioned = max(compute_state_partition(spec.layout)) > 0
    return StepMetrics(spec.config, context, spec.generation, state_memory, timers, emit, defers=is_partitioned)


def _get_pending_work(spec: WorkerSpec) -> PendingWork:
    return PendingWork(
        spec.pending_eval_metrics,
        spec.has_pending_checkpoint,
        spec.start_metrics,
        spec.is_start_unpublished,
        checks_determinism=spec.memory_step is None and spec.start_step < spec.end_step,
    )


def preload_modules(config: Config) -> None:
    """Import the modules that a run of this kind needs beyond this one, which takes a second or more.

    Call when a worker starts: inside a generation the import would delay recovery.
    """
    if config.parallel.zero:
        import raytrain_hpc.parallel.fsdp
        import raytrain_hpc.state.dtensor  # noqa: F401
    if config.parallel.zero or config.parallel.activation_checkpointing != "none":
        load_dynamo()  # the first sharded parameter, or recomputed block, would
    if config.parallel.pp != 1:
        load_symbolic_shapes()  # the backward pass of a stage would
    if config.optimizer.name not in OPTIMIZER_NAMES:
        check_optimizer_class(config)  # the first object of such a class loads TorchDynamo


def configure_torch(config: Config, device: torch.device) -> None:
    """Set threads, determinism and device of this process. Call before any process group or tensor is created.

    Modules are imported first, because a module imported inside a generation would keep its process groups alive.
    Raises ConfigError if the device lacks float8: the driver does not know every device by its name.
    """
    check_float8(config, list_without_float8(device))
    preload_modules(config)
    torch.set_num_threads(config.cluster.cpu_threads)
    is_deterministic = config.train.deterministic is not False
    if config.train.compile is True:
        torch.use_deterministic_algorithms(is_deterministic)  # the compiler reads it too; loads it, which takes seconds
    else:
        torch.set_deterministic_debug_mode("error" if is_deterministic else "default")
    # Filling new tensors takes 2 % of a step of Llama 1B on an H200, and changes nothing that reads what was written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_device(device, is_deterministic=is_deterministic)
    configure_attention(device, uses_mask=config.data.packing == "documents")


def _init_groups(
    spec: WorkerSpec, rank: int, device: torch.device, rendezvous: Rendezvous | None, control: ControlChannel
) -> ParallelContext:
    # One node may copy a dataset that another one has. The watchdog sees a copy that stalls.
    arrival_timeout_s = _COPY_TIMEOUT_S if spec.config.data.local_cache else None
    return init_process_groups(
        rendezvous,
        rank,
        spec.layout,
        device,
        arrival_timeout_s=arrival_timeout_s,
        arm_abort=control.arm_abort,
        **get_group_options(spec),
    )


def get_group_options(spec: WorkerSpec) -> GroupOptions:
    """Return the keyword arguments of `init_process_groups` that depend on the model."""
    has_tied_weights = spec.custom is None and spec.model_spec.tie_embeddings
    return GroupOptions(tied_weights=has_tied_weights, balance_experts=_has_expert_bias(spec))


def _has_expert_bias(spec: WorkerSpec) -> bool:
    return spec.custom is None and spec.model_spec.load_balancing == "bias"


def _build_model_update(
    spec: WorkerSpec,
    model: ParallelModel,
    optimizer: Optimizer,
    peer_info: PeerInfo,
    context: ParallelContext,
    running_statistics: RunningStatistics,
) -> ModelUpdate:
    is_elastic, indexes = spec.config.train.deterministic == "elastic", peer_info.destination_indexes
    check_group_patterns(spec, indexes)
    connect_optimizer(optimizer, model, indexes, context)
    return ModelUpdate(
        optimizer,
        LearningRate(spec.config, spec.lr_schedule),
        build_gradient_norm(model, indexes, context, exact=is_elastic),
        running_statistics,
        spec.config.train.max_grad_norm,
    )


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
    snapshots.begin_generation(
        spec.start_step,
        spec.generation,
        peers.own_snapshots,
        attached_snapshots,
        peers.replicas,
        is_start_verified=spec.start_step <= spec.verified_step,
    )
    peers.publish(control)
    return snapshots


def _build_rollback(
    spec: WorkerSpec,
    state: ShardedState,
    peer_info: PeerInfo,
    context: ParallelContext,
    store: CheckpointStore,
    checkpointer: Checkpointer,
    optimizer: Optimizer,
    callback_state: CallbackState,
) -> CheckpointRollback:
    return CheckpointRollback(
        store,
        context,
        state,
        peer_info.destination_indexes,
        checkpointer.get_last_due_step,
        checkpointer.finish,
        partial(_after_rollback, optimizer, callback_state),
    )


def _build_trainer_callbacks(
    spec: WorkerSpec,
    model: ParallelModel,
    context: ParallelContext,
    evaluator: Evaluator | None,
    audits: StepAudits | None,
) -> list[Callback]:
    callbacks: list[Callback] = []
    if spec.config.logging.rank_stats_interval:
        callbacks.append(RankStatistics(spec.config.logging.rank_stats_interval, context))
    if evaluator is not None:
        callbacks.append(EvaluationSchedule(spec.config.eval))
    if _has_expert_bias(spec):
        rate = spec.model_spec.expert_bias_rate
        callbacks.append(ExpertBias(model.modules.values(), rate, context.batch_group, audits))
    return callbacks


def _after_rollback(optimizer: Optimizer, callback_state: CallbackState) -> None:
    """Release the memory of moments that were read, and load the state of callbacks."""
    optimizer.release_memory()
    callback_state.restore()


def _ignore_record(record: object) -> None:
    """Discard a record that rank 0 emits for all ranks."""
