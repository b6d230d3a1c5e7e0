"""The model of one rank: its stages, parallelized and initialized, and the passes through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from raytrain_hpc.config.model_spec import resolve_model_config
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.model.decoder import loss_sum
from raytrain_hpc.model.lora import LORA_MARKER
from raytrain_hpc.model.param_init import count_init_threads, init_tensors
from raytrain_hpc.model.transformers_model import check_document_isolation
from raytrain_hpc.parallel.parallelize import ParallelModel, get_local_positions, parallelize
from raytrain_hpc.parallel.pipeline_parallel import Pipeline
from raytrain_hpc.parallel.precision import get_param_dtype, get_residual_dtype
from raytrain_hpc.parallel.reduction_order import make_reduction_orders
from raytrain_hpc.parallel.vocab_parallel import vocab_parallel_loss_sum
from raytrain_hpc.planner.stage_split import split_layers
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.runtime.worker_spec import CustomModel, WorkerSpec
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.training.forward_backward import ForwardBackward, LocalForwardBackward
from raytrain_hpc.training.loss_check import LossCheck
from raytrain_hpc.training.module_tensors import broadcast_bytes, cast_floating_point, check_dtypes
from raytrain_hpc.training.pipeline_forward_backward import PipelineForwardBackward, TimelineReporter
from raytrain_hpc.training.running_statistics import RunningStatistics
from raytrain_hpc.training.state_builder import ParameterSlice, list_persistent_buffers
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import CustomTrainModule, DecoderTrainModule, SampleTrainModule, TrainModule


def build_train_module(
    spec: WorkerSpec, context: ParallelContext, log: Callable[[str], None] | None = None
) -> TrainModule:
    """Build the train module: the decoder or a user's module, with the loss that fits this rank's layout.

    `log`: prints a line, for the check of a user's loss at the start of a run.
    """
    custom = spec.custom
    if isinstance(custom, CustomModel):
        kind = CustomTrainModule if custom.dataset is None else SampleTrainModule
        has_check = log is not None and spec.is_fresh_start and custom.hf_config is None
        check = LossCheck(log if context.rank == 0 else None) if has_check else None
        config = spec.config
        if custom.dataset is None:  # a factory may ask for the vocabulary
            config = replace(config, model=resolve_model_config(config.model, spec.model_spec))
        return kind(custom.factory, custom.loss, config, custom.run, check)
    model_spec, config, tp_axis = spec.model_spec, spec.config, context.axes.get("tp")
    positions = get_local_positions(config.train.seq_len, context.axes)
    stage_layers = split_layers(model_spec, config.train.seq_len, spec.layout.pipeline.num_stages)
    shard_positions, loss = positions, loss_sum
    if tp_axis is not None:
        local_range = tp_axis.get_local_range(len(positions))
        shard_positions = positions[local_range.start : local_range.stop]
        loss = partial(vocab_parallel_loss_sum, axis=tp_axis, vocab_size=model_spec.vocab_size)
    elif config.train.compile is True:
        loss = torch.compile(loss_sum)
    return DecoderTrainModule(model_spec, config.run.seed, positions, shard_positions, stage_layers, loss)


def build_model(train_module: TrainModule, spec: WorkerSpec, context: ParallelContext) -> ParallelModel:
    """Build and parallelize this rank's stages. Collective over all ranks.

    Weights get their initial values in a fresh run; otherwise a checkpoint or snapshot is loaded into them later.
    """
    config, layout = spec.config, context.layout
    stages = layout.pipeline.get_stages_of_rank(context.coordinates["pp"])
    dtype = get_param_dtype(config.train.dtype)
    # A user's factory can return a module with parts in evaluation mode, as transformers does.
    modules = {stage: train_module.build(stage).train() for stage in stages}
    for module in modules.values():
        check_dtypes(module)
        cast_floating_point(module, dtype)
    if context.mesh is not None:
        for module in modules.values():
            _broadcast_initial_weights(module, context.device)
    is_elastic = config.train.deterministic == "elastic"
    model = parallelize(
        modules,
        config=config,
        layout=layout,
        mesh=context.mesh,
        axes=context.axes,
        expert_mesh=context.expert_mesh,
        device=context.device,
        reduction_orders=make_reduction_orders(layout, spec.batching, context.rank) if is_elastic else None,
        keyed_randomness=train_module.keyed_randomness,
        module_plan=spec.custom.plan if isinstance(spec.custom, CustomModel) else None,
        tracer=context.tracer,
    )
    if spec.is_fresh_start:
        name_part = "" if spec.init_checkpoint is None else LORA_MARKER
        _init_weights(train_module, model, name_part, count_init_threads(spec.max_ranks_per_node))
    if isinstance(train_module, DecoderTrainModule):  # its buffers are expert counts and biases, which start at zero
        for module in modules.values():
            for buffer in module.buffers():
                buffer.zero_()
    return model


def build_forward_backward(
    train_module: TrainModule,
    model: ParallelModel,
    spec: WorkerSpec,
    context: ParallelContext,
    timers: PhaseTimer,
    running_statistics: RunningStatistics,
    emit: Callable[[Record], None],
) -> ForwardBackward:
    """Return the forward and backward passes over a step's microbatches, through a pipeline if there is one.

    `emit` takes the pipeline timelines of this rank (`logging.pipeline_timeline_interval`).
    """
    dtype = spec.config.train.dtype
    if spec.config.data.packing == "documents" and not isinstance(train_module, DecoderTrainModule):
        check_document_isolation(model.modules[0], context.device, spec.config.model.hf)
        model.gradient_sync.free_gathered_weights()
    if context.stage_groups is None or not isinstance(train_module, DecoderTrainModule):
        tracer = context.tracer
        return LocalForwardBackward(train_module, model, dtype, context.device, timers, running_statistics, tracer)
    pipeline = Pipeline(spec.layout.pipeline, context.coordinates["pp"], context.stage_groups)
    residual_shape = (len(train_module.shard_positions), spec.model_spec.hidden_size)
    timeline = TimelineReporter(context.rank, spec.config.logging.pipeline_timeline_interval, emit)
    residual_dtype = get_residual_dtype(spec.config.train, spec.layout)
    return PipelineForwardBackward(
        train_module,
        model,
        pipeline,
        dtype,
        residual_dtype,
        residual_shape,
        context.device,
        timeline,
        timers,
        context.tracer,
    )


def build_running_statistics(
    train_module: TrainModule, model: ParallelModel, spec: WorkerSpec, context: ParallelContext
) -> RunningStatistics:
    """Return the buffers that depend on the data a rank saw: those of a user's module. A decoder has none."""
    if isinstance(train_module, DecoderTrainModule):
        return RunningStatistics((), context.world_group)
    buffers = [buffer for module in model.modules.values() for buffer in module.buffers()]
    is_elastic, audited = spec.config.train.deterministic == "elastic", dict(list_persistent_buffers(model))
    return RunningStatistics(buffers, context.world_group, is_elastic=is_elastic, audited=audited)


def _init_weights(train_module: TrainModule, model: ParallelModel, name_part: str, num_threads: int) -> None:
    """Set the initial values of the parameters whose canonical names contain `name_part` ("": all of them).

    Each global tensor is drawn whole, from the seed and its name, and freed after this rank's slices are copied:
    initial weights depend neither on the layout nor on `num_threads`, and at most `num_threads` large whole tensors are
    in memory at a time (see `init_tensors`).
    """
    slices: dict[str, list[ParameterSlice]] = {}
    for name in model.parameters:
        canonical_name = model.get_shard_spec(name).name
        if name_part in canonical_name:
            slices.setdefault(canonical_name, []).append(ParameterSlice(model, name))

    def copy(name: str, global_tensor: Tensor | None) -> None:
        if global_tensor is not None:
            for local_slice in slices[name]:
                for shard in local_slice.make_shards("model", local_slice.tensor):
                    shard.tensor.copy_(global_tensor[shard.box.to_slices(Box.from_shape(shard.shape))])

    sizes = {name: torch.Size(local_slices[0].shard_spec.shape) for name, local_slices in slices.items()}
    init_tensors(sizes, train_module.init_param, copy, num_threads)


def _broadcast_initial_weights(module: nn.Module, device: torch.device) -> None:
    """Broadcast weights and buffers from rank 0: a user's model factory need not be deterministic.

    `device`: on which ranks communicate. The module can still be on the CPU, which NCCL does not support.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            received = tensor.detach().to(device)
            broadcast_bytes(received)
            tensor.detach().copy_(received)
