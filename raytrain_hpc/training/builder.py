"""Puts one rank together: groups, model, weights, optimizer, data, checkpoint; each part built once, passed on."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.loader.block_stream import BlockSource, BlockStream
from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.data.loader.packing import build_packing
from raytrain_hpc.data.loader.stream import Stream
from raytrain_hpc.distributed.abort import CollectiveAbort
from raytrain_hpc.distributed.handshake import exchange_peer_info
from raytrain_hpc.distributed.process_groups import ParallelContext, init_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.elastic.loss_spikes import WINDOW
from raytrain_hpc.elastic.state_partition import compute_state_partition
from raytrain_hpc.model.decoder import loss_sum
from raytrain_hpc.model.lora import LORA_MARKER
from raytrain_hpc.observability.profiler import StepProfiler
from raytrain_hpc.optim.grad_norm import ExactGradientNorm, GradientNorm, Region
from raytrain_hpc.optim.offload import make_moment_storage
from raytrain_hpc.optim.optimizer import MOMENT_NAMES, Optimizer, get_local_slices
from raytrain_hpc.parallel.deterministic_reduce import make_reduction_order
from raytrain_hpc.parallel.parallelize import (
    ParallelModel,
    get_local_positions,
    get_param_dtype,
    get_residual_dtype,
    parallelize,
)
from raytrain_hpc.parallel.pipeline_parallel import Pipeline
from raytrain_hpc.parallel.vocab_parallel import vocab_parallel_loss_sum
from raytrain_hpc.planner.layout import find_first_rank
from raytrain_hpc.planner.stage_split import split_layers
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.runtime.fault_injection import FaultInjector
from raytrain_hpc.runtime.worker_spec import CustomModel, WorkerSpec
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.state.shard_index import Box, StateIndex, find_owned_regions
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, dtype_name, get_local_slice
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.device_loader import DeviceLoader
from raytrain_hpc.training.expert_bias import ExpertBias
from raytrain_hpc.training.forward_backward import ForwardBackward, LocalForwardBackward
from raytrain_hpc.training.pipeline_forward_backward import PipelineForwardBackward, TimelineReporter
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.snapshot_peers import SnapshotPeers
from raytrain_hpc.training.state_loader import RECENT_LOSSES, CheckpointRollback, restore_state
from raytrain_hpc.training.step_guard import StepGuard
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import CustomTrainModule, DecoderTrainModule, TrainModule
from raytrain_hpc.training.trainer import Trainer


def build_trainer(
    spec: WorkerSpec,
    rank: int,
    device: torch.device,
    rendezvous: Rendezvous | None,
    control: ControlChannel,
    blocks: BlockSource | None = None,
    snapshot_store: SnapshotStore | None = None,
) -> Trainer:
    """Everything that rank `rank` of this generation needs, its state loaded and checked against its replicas.

    `blocks`: where others read for it. `memory`: the snapshots that this process holds of earlier generations, and
    where those of this one go. Raises StateLost where nobody holds a part of the step to go on from.
    """
    marks: Record = {"type": "ready", "rank": rank, "build_began": time.time()}
    configure_torch(config := spec.config, device)
    place = _init_groups(spec, rank, device, rendezvous, marks)
    task = _build_train_module(spec, place)
    parallel = _build_model(task, spec, place)
    optimizer, recent = _build_optimizer(parallel, spec, rank), _make_recent_losses(config, device)
    holding, offered = build_state(parallel, optimizer, recent), _get_memory_state(spec, snapshot_store)
    buddies = SnapshotPeers(spec, rank, snapshot_store, device)
    told = exchange_peer_info(
        holding.to_index(), offered.to_index(), place, buddies.handles
    )  # when all groups are made
    store = CheckpointStore(Path(config.run.dir) / "checkpoints")
    restore_state(spec, place, holding, offered, told, store)
    (replicas := ReplicaCheck(holding, place)).compare()
    keeper = SnapshotManager(
        config,
        snapshot_store,
        holding,
        _live_state_suffices(spec, parallel),
        buddies.create_replicator(told),
        optimizer.release_memory,
    )
    keeper.begin_generation(
        spec.start_step, spec.generation, buddies.own_snapshots, buddies.attach_snapshots(told, control.log)
    )
    saver = Checkpointer(
        holding, told.destination_indexes, place, store, spec.generation, config.checkpoint, control.emit
    )
    go_back = CheckpointRollback(
        store, config.checkpoint.every, place, holding, told.destination_indexes, saver.finish, optimizer.release_memory
    )
    optimizer.release_memory()
    feed, evaluation = _build_loaders(spec, place, control, blocks)
    control.arm_abort(CollectiveAbort(told.peer_sockets))
    control.emit(marks | {"model": time.time()})
    emit, watch = control.emit if rank == 0 else _ignore_record, PhaseTimer(device)
    return Trainer(
        config=config,
        context=place,
        batching=spec.batching,
        buffers=_list_running_statistics(task, parallel),
        expert_bias=_build_expert_bias(spec, parallel, place),
        model_step=_build_forward_backward(task, parallel, spec, place, watch, control.emit),
        timers=watch,
        step_guard=StepGuard(config.fault, recent, partial(find_first_rank, spec.layout, spec.batching), go_back, emit),
        optimizer=optimizer,
        gradient_norm=_build_gradient_norm(parallel, told.destination_indexes, place, exact=_is_elastic(config)),
        loader=feed,
        eval_set=evaluation,
        checkpointer=saver,
        profiler=StepProfiler(config.observe, rank, Path(config.run.dir)),
        generation=spec.generation,
        emit=emit,
        control=control,
        snapshots=keeper,
        replica_check=replicas,
        memory_metrics=_measure_memory_gib(parallel, optimizer),
        fault_injector=FaultInjector(config.fault.inject, rank, spec.layout.world_size, Path(config.run.dir), task),
        pending_eval_metrics=spec.pending_eval_metrics,
        has_pending_checkpoint=spec.has_pending_checkpoint,
    )


def _init_groups(
    spec: WorkerSpec, rank: int, device: torch.device, rendezvous: Rendezvous | None, timestamps: Record
) -> ParallelContext:
    tied = spec.custom is None and spec.model_spec.tie_embeddings
    place = init_process_groups(
        rendezvous, rank, spec.layout, device, tied_weights=tied, balance_experts=_has_expert_bias(spec)
    )
    timestamps["groups"] = time.time()
    return place


def _has_expert_bias(spec: WorkerSpec) -> bool:
    return spec.custom is None and spec.model_spec.balance == "bias"


def _build_expert_bias(spec: WorkerSpec, model: ParallelModel, context: ParallelContext) -> ExpertBias:
    return ExpertBias(
        model.modules.values() if _has_expert_bias(spec) else (), spec.model_spec.balance_rate, context.batch_group
    )


def _build_optimizer(model: ParallelModel, spec: WorkerSpec, rank: int) -> Optimizer:
    config = spec.config
    home = make_moment_storage(
        config, get_local_slices(model.trainable_parameters), MOMENT_NAMES[config.train.optimizer], rank
    )
    optimizer = Optimizer(model.trainable_parameters, config.train, home)
    optimizer.set_steps(spec.start_step)
    return optimizer


def _live_state_suffices(spec: WorkerSpec, model: ParallelModel) -> bool:
    """Whether what is live is the whole state of a step: buffers change in forward passes."""
    return max(compute_state_partition(spec.layout)) == 0 and not _list_persistent_buffers(model)


def _get_memory_state(spec: WorkerSpec, snapshot_store: SnapshotStore | None) -> ShardedState:
    """What this process has of the step to go on from."""
    return (
        ShardedState()
        if snapshot_store is None or spec.memory_step is None
        else snapshot_store.get_state(spec.memory_step)
    )


def _make_recent_losses(config: Config, device: torch.device) -> torch.Tensor | None:
    """Room for them where spikes are looked for."""
    if not config.fault.spike_deviations:
        return None
    return torch.full((WINDOW,), torch.nan, dtype=torch.float64, device=device)


def build_state(model: ParallelModel, optimizer: Optimizer, recent_losses: torch.Tensor | None = None) -> ShardedState:
    """What this rank holds of the training state: weights, persistent buffers, optimizer moments, recent losses."""
    weights = [_ParameterSlice(model, name) for name in model.parameters]
    held = [one for weight in weights for one in weight.make_shards("model", weight.tensor)]
    held += [StateShard.from_tensor(f"model.{name}", buffer) for name, buffer in _list_persistent_buffers(model)]
    for kind, moments in optimizer.moments.items():
        trained = [weight for weight in weights if weight.name in moments]
        held += [one for weight in trained for one in weight.make_shards(f"optimizer.{kind}", moments[weight.name])]
    held += [] if recent_losses is None else [StateShard.from_tensor(RECENT_LOSSES, recent_losses)]
    return ShardedState(held)


def _measure_memory_gib(model: ParallelModel, optimizer: Optimizer) -> dict[str, float]:
    """GiB of weights and moments that this rank holds between two steps."""
    moments = [moment for of_kind in optimizer.moments.values() for moment in of_kind.values()]
    sizes = {
        "weights": sum(get_local_slice(parameter)[2].nbytes for parameter in model.parameters.values()),
        "moments": sum(moment.nbytes for moment in moments),
    }
    return {f"memory/{kind}_gib": size / 2**30 for kind, size in sizes.items()}


def _list_persistent_buffers(model: ParallelModel) -> list[tuple[str, torch.Tensor]]:
    """The persistent ones; a second name of a tied weight is no buffer."""
    found = []
    for module in model.modules.values():
        buffers = dict(module.named_buffers())
        found += [(name, buffers[name]) for name in module.state_dict() if name in buffers]
    return found


class _ParameterSlice:
    """What a rank stores of one parameter, and which parts of the global tensor that is."""

    def __init__(self, model: ParallelModel, name: str):
        _, box, self.tensor = get_local_slice(model.parameters[name])
        self.name, self.shard_spec = name, model.get_shard_spec(name)
        self.mappings = self.shard_spec.restrict(box)

    def make_shards(self, kind: str, tensor: torch.Tensor) -> list[StateShard]:
        """The parts of a tensor laid out like this one, as state: the parameter itself, or a moment of it."""
        everything = Box.from_shape(tensor.shape)
        return [
            StateShard(
                f"{kind}.{self.shard_spec.name}",
                self.shard_spec.shape,
                dtype_name(tensor.dtype),
                part.global_box,
                tensor[part.local_box.to_slices(everything)],
            )
            for part in self.mappings
        ]


def _build_gradient_norm(
    model: ParallelModel, indexes: list[StateIndex], context: ParallelContext, *, exact: bool
) -> GradientNorm:
    """Of what several ranks of a replica hold, the first one's counts."""
    ranks = context.get_state_ranks()
    slices = [_ParameterSlice(model, name) for name in model.parameters]
    names = {f"model.{one.shard_spec.name}" for one in slices}
    counted = find_owned_regions([indexes[rank] for rank in ranks], ranks.index(context.rank), names)
    regions: dict[str, list[Region]] = {}
    numbers: Counter[str] = Counter()
    for one in slices:
        name = f"model.{one.shard_spec.name}"
        for part in one.mappings:
            for box in (box for number, box in counted[name] if number == numbers[name]):
                start = [
                    o + b - w
                    for o, b, w in zip(part.local_box.offsets, box.offsets, part.global_box.offsets, strict=True)
                ]
                region = Box(tuple(start), box.sizes).to_slices(Box.from_shape(one.tensor.shape))
                regions.setdefault(one.name, []).append(None if box.numel == one.tensor.numel() else region)
            numbers[name] += 1
    kind = ExactGradientNorm if exact else GradientNorm
    return kind(regions, context.state_group, context.device)


def _ignore_record(record: object) -> None:
    """Only rank 0 reports steps and notes: every rank would say the same."""


def preload_modules(config: Config) -> None:
    """Import what such a run needs beyond this module, for a second or more: a generation is not to wait for it."""
    if config.parallel.zero:
        import raytrain_hpc.parallel.fsdp
        import raytrain_hpc.state.dtensor  # noqa: F401


def configure_torch(config: Config, device: torch.device) -> None:
    """What a process computes with: modules, threads, determinism, the device.

    First the modules: those that were loaded inside a generation would keep its groups alive.
    """
    preload_modules(config)
    torch.set_num_threads(config.cluster.threads)
    wanted = config.train.deterministic is not False
    if config.train.compile:
        torch.use_deterministic_algorithms(wanted)  # tells the compiler too, and so loads it: seconds
    else:
        torch.set_deterministic_debug_mode("error" if wanted else "default")
    if device.type == "cuda":
        if wanted:  # read when the first handle is made; without it cuBLAS is refused
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.cuda.reset_peak_memory_stats(device)


def _is_elastic(config: Config) -> bool:
    return config.train.deterministic == "elastic"


def _build_train_module(spec: WorkerSpec, context: ParallelContext) -> TrainModule:
    if isinstance(spec.custom, CustomModel):
        return CustomTrainModule(spec.custom.factory, spec.custom.loss, spec.config)
    shape, config, axis = spec.model_spec, spec.config, context.axes.get("tp")
    positions = get_local_positions(config.train.seq_len, context.axes)
    stages = split_layers(shape, config.train.seq_len, spec.layout.pipeline.num_stages)
    if axis is None:
        whole = torch.compile(loss_sum) if config.train.compile else loss_sum
        return DecoderTrainModule(shape, config.run.seed, positions, positions, stages, whole)
    share = axis.get_local_range(len(positions))
    loss = partial(vocab_parallel_loss_sum, axis=axis, vocab_size=shape.vocab_size)
    return DecoderTrainModule(shape, config.run.seed, positions, positions[share.start : share.stop], stages, loss)


def _build_forward_backward(
    train_module: TrainModule,
    model: ParallelModel,
    spec: WorkerSpec,
    context: ParallelContext,
    timers: PhaseTimer,
    emit: Callable[[Record], None],
) -> ForwardBackward:
    dtype = spec.config.train.dtype
    if context.stage_groups is None or not isinstance(train_module, DecoderTrainModule):
        return LocalForwardBackward(train_module, model, dtype, context.device, timers)
    pipeline = Pipeline(spec.layout.pipeline, context.coordinates["pp"], context.stage_groups)
    width = (len(train_module.shard_positions), spec.model_spec.hidden_size)
    timeline = TimelineReporter(context.rank, spec.config.observe.timeline_every, emit)
    stream = get_residual_dtype(dtype, spec.layout)
    return PipelineForwardBackward(
        train_module, model, pipeline, dtype, stream, width, context.device, timeline, timers
    )


def _build_model(train_module: TrainModule, spec: WorkerSpec, context: ParallelContext) -> ParallelModel:
    config = spec.config
    stages = context.layout.pipeline.get_stages_of_rank(context.coordinates["pp"])
    modules = {stage: train_module.build(stage).to(get_param_dtype(config.train.dtype)) for stage in stages}
    if context.mesh is not None:
        for module in modules.values():
            _broadcast_initial_weights(module)
    parallel = parallelize(
        modules,
        config,
        context.layout,
        context.mesh,
        context.device,
        context.axes,
        context.expert_mesh,
        make_reduction_order(context.layout, spec.batching, context.rank) if _is_elastic(config) else None,
        keyed_randomness=train_module.keyed_randomness,
    )
    if spec.is_fresh_start:  # what is loaded need not be drawn
        _init_weights(train_module, parallel, "" if spec.init_checkpoint is None else LORA_MARKER)
    if isinstance(train_module, DecoderTrainModule):  # its buffers are counts and biases
        for buffer in (one for module in modules.values() for one in module.buffers()):
            buffer.zero_()
    return parallel


def _init_weights(train_module: TrainModule, model: ParallelModel, name_part: str) -> None:
    """First values of parameters whose canonical names have `part` in them."""
    slices: dict[str, list[_ParameterSlice]] = {}
    for name in model.parameters:
        slices.setdefault(model.get_shard_spec(name).name, []).append(_ParameterSlice(model, name))
    for canonical, pieces in slices.items():
        if name_part not in canonical:
            continue
        whole = train_module.init_param(canonical, torch.Size(pieces[0].shard_spec.shape))
        if whole is not None:
            for held in (held for one in pieces for held in one.make_shards("model", one.tensor)):
                held.tensor.copy_(whole[held.box.to_slices(Box.from_shape(held.shape))])


def _list_running_statistics(train_module: TrainModule, model: ParallelModel) -> list[torch.Tensor]:
    """Buffers that every rank changes in its own way: a user's module can have them, a decoder has none."""
    modules = () if isinstance(train_module, DecoderTrainModule) else model.modules.values()
    return [buffer for module in modules for buffer in module.buffers()]


def _broadcast_initial_weights(module: nn.Module) -> None:
    """A user's factory need not be deterministic: all ranks start from what rank 0 made."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            dist.broadcast(tensor.detach(), 0)


def _build_loaders(
    spec: WorkerSpec, context: ParallelContext, control: ControlChannel, blocks: BlockSource | None
) -> tuple[DeviceLoader, EvaluationSet | None]:
    config, layout = spec.config, spec.layout
    dataset = spec.stream_recipe.open_dataset()
    local = spec.stream_recipe.open_stream(dataset)
    stream: Stream = local
    if blocks is not None:
        stream = BlockStream(local, blocks, control.log if context.rank == 0 else _ignore_record)
    share = spec.batching.split_by_rank(layout.dp_size)[layout.get_dp_rank(context.rank)]
    feed = DeviceLoader(stream, spec.batching, share, context.device, config.data)
    if dataset.val is None:
        return feed, None
    packing = build_packing(config.data.packing, config.train.seq_len)
    return feed, EvaluationSet(dataset.val, packing, spec.batching.size, max_samples=config.train.eval_samples)
