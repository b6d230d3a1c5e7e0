"""Parallelization of a model: the one place that fixes the order in which dimensions and features are applied.

The caller has split the model into pipeline stages (training/model_builder.py). Each stage of a rank goes through, in
this order, 1 to 6 for Decoders only:

1. expert parallelism, and tensor parallelism of the channels of experts
2. tensor parallelism (of other modules: by a plan, module_plan.py)
3. context parallelism, and attention within documents
4. LoRA
5. tiling, and the loss in chunks
6. float8 products
7. frozen parameters (optimizer.groups)
8. activation checkpointing and compile: outside of checkpointing, unless a block is split into several graphs
9. activation offload
10. deferred weight gradients

Then data parallelism is applied to all stages of the rank together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raytrain_hpc.config.parameter_groups import is_frozen
from raytrain_hpc.config.schema import Config
from raytrain_hpc.config.training_config import ParameterGroupConfig, computes_in_bf16
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.lora import LoraSpec
from raytrain_hpc.parallel.activation_checkpoint import apply_activation_checkpointing
from raytrain_hpc.parallel.activation_offload import ActivationOffload
from raytrain_hpc.parallel.block_discovery import find_blocks
from raytrain_hpc.parallel.compile import compile_blocks, make_traceable, prepare_compile
from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.parallel.context_parallel import apply_context_parallel, get_rank_positions
from raytrain_hpc.parallel.data_parallel import apply_data_parallel
from raytrain_hpc.parallel.deferred_wgrad import WeightGradStore
from raytrain_hpc.parallel.document_attention import apply_document_attention
from raytrain_hpc.parallel.expert_parallel import apply_expert_parallel, apply_grouped_kernel
from raytrain_hpc.parallel.float8_linear import apply_float8
from raytrain_hpc.parallel.gradient_sync import GradientSync
from raytrain_hpc.parallel.loss_chunks import apply_loss_chunks
from raytrain_hpc.parallel.mesh_axis import Axis, ExpertMesh
from raytrain_hpc.parallel.module_plan import apply_module_plan, find_planned_blocks
from raytrain_hpc.parallel.precision import get_compute_itemsize, get_residual_dtype
from raytrain_hpc.parallel.reduction_order import ReductionOrders
from raytrain_hpc.parallel.sharded_lora import apply_lora
from raytrain_hpc.parallel.tensor_parallel import apply_tensor_parallel, list_partial_grads, name_head_weight
from raytrain_hpc.parallel.tied_gradients import all_reduce_gradients, sum_tied_gradients
from raytrain_hpc.parallel.tiled_linear import apply_tiling
from raytrain_hpc.parallel.weight_copies import WeightCopies
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.state.shard_spec import ShardSpec

_log = logging.getLogger(__name__)


@dataclass
class ParallelModel:
    """The stages of a model that a rank holds, parallelized for a layout. Without a pipeline, stage 0 is the model.

    `shard_specs`: by local name, those of sharded parameters, tiles, LoRA base weights and heads; any other parameter
    is the whole tensor of its own name. `partial_grads`: parameters whose gradients must be summed over the "tp" axis
    after the backward passes. `parameters`: all weights by local name: those of copies, not the copies; DTensors if
    FSDP2 shards them.
    """

    modules: dict[int, nn.Module]
    gradient_sync: GradientSync
    axes: Mapping[str, Axis] = field(default_factory=dict)
    shard_specs: Mapping[str, ShardSpec] = field(default_factory=dict)
    partial_grads: list[str] = field(default_factory=list)
    weight_grad_store: WeightGradStore = field(default_factory=WeightGradStore)
    weight_copies: WeightCopies = field(default_factory=WeightCopies)

    def __post_init__(self) -> None:
        named = [
            (name, self.weight_copies.get_weight(parameter))
            for module in self.modules.values()
            for name, parameter in module.named_parameters()
        ]
        self.parameters: dict[str, nn.Parameter] = dict(named)
        if len(named) != len(self.parameters):
            raise ValueError("two stages of a rank have a parameter of the same name")

    @property
    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are not frozen."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @cached_property
    def _embedding_tables(self) -> list[nn.Parameter]:
        """Embedding tables on this rank. With tied embeddings, the last pipeline stage has a copy of the table."""
        return [p for name, p in self.parameters.items() if self.get_shard_spec(name).name == "embedding.weight"]

    def prepare_passes(self, *, is_training: bool) -> None:
        """Prepare all stages for the passes of a step or of an evaluation, in which weights do not change."""
        self.gradient_sync.free_gathered_weights()  # those of an evaluation may have changed since then
        self.weight_copies.refresh()
        for module in self.modules.values():
            if module.training != is_training:  # a switch visits every submodule
                module.train(is_training)

    def get_shard_spec(self, name: str) -> ShardSpec:
        """Return the part of the global tensor that a parameter is, before data parallelism shards it further."""
        return self.shard_specs.get(name) or ShardSpec.from_shape(name, self.parameters[name].shape)

    def finish_grad_sync(self) -> None:
        """Complete the sums of gradients: over data- and context-parallel ranks, over "tp", and of tied tables.

        Call after the last backward pass of a step; most of the first ran during the backward passes. Collective.
        Gradients are sums: the trainer divides them by the token count.
        """
        self.gradient_sync.finish_grad_sync()
        if "tp" in self.axes:
            all_reduce_gradients([self.parameters[name] for name in self.partial_grads], self.axes["tp"])
        if len(self._embedding_tables) == 2:
            sum_tied_gradients(*self._embedding_tables)
        elif "tied" in self.axes:
            all_reduce_gradients(self._embedding_tables, self.axes["tied"])


def parallelize(
    stages: dict[int, nn.Module],
    *,
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    axes: Mapping[str, Axis],
    expert_mesh: ExpertMesh | None,
    device: torch.device,
    reduction_orders: ReductionOrders | None,
    keyed_randomness: bool,
    module_plan: Mapping[str, str] | None = None,
    tracer: ComputationTracer | None = None,
) -> ParallelModel:
    """Parallelize the stages of this rank in place, and allocate their parameters on `device`.

    No communication, except that FSDP2 creates groups if `parallel.reshard_over` is set. Steps 1 to 10 do nothing for
    an axis of size 1 and a feature that is off; data parallelism always allocates the parameters. cp, pp, ep, LoRA,
    tiling and float8 need Decoders; driver/run_setup.py refuses them for other modules, and tp unless they have a plan.
    Parameters on the meta device stay uninitialized: each rank fills its own slices afterwards, so that a model larger
    than a device is never whole in memory.

    `mesh`: the axes tp, pp, copies and dp_shard, as far as larger than 1. `axes`: those along which tensors or
    sequences are split (ep, tp, ring, ulysses), and "tied". `expert_mesh`: the ranks that share an expert.
    `reduction_orders`: of gradient additions for train.deterministic=elastic, else None. `keyed_randomness`:
    random bits come from keys, not from generator state. `module_plan`: of a module that is no Decoder. `tracer`:
    traces the microbatches that audits compare; it needs reduction orders.
    """
    weight_copies, plan, partial_grads = WeightCopies(), module_plan or {}, list[str]()
    weight_grad_store, tracer = WeightGradStore(weight_copies), tracer or ComputationTracer()
    blocks, shard_specs = dict[int, list[nn.Module]](), dict[str, ShardSpec]()
    if config.train.compile is True:
        prepare_compile(axes, weight_grad_store)
    offload = ActivationOffload(device) if config.parallel.activation_offload != "none" else None
    for stage, module in stages.items():
        shard_specs = _shard_stage(module, plan, config, layout, axes, device, shard_specs, partial_grads, tracer)
        _freeze_parameters(module, config.optimizer.groups, shard_specs)
        blocks[stage] = find_planned_blocks(module, plan) or find_blocks(module)
        units = blocks[stage] or [module]  # a module without repeated blocks is one unit
        _apply_checkpointing_and_compile(module, units, config, layout, keyed_randomness=keyed_randomness)
        if offload is not None:
            offload.apply(units)
        if _defers_wgrad(layout):
            weight_grad_store.attach(module)
    gradient_sync = apply_data_parallel(
        stages,
        blocks,
        config=config,
        layout=layout,
        mesh=mesh,
        device=device,
        expert_mesh=expert_mesh,
        reduction_orders=reduction_orders,
        weight_grad_store=weight_grad_store if _defers_wgrad(layout) else None,
        weight_copies=weight_copies,
        tracer=tracer,
    )
    for line in describe_parallelism(config, layout):
        _log.info(line)
    return ParallelModel(stages, gradient_sync, axes, shard_specs, partial_grads, weight_grad_store, weight_copies)


def _shard_stage(
    module: nn.Module,
    plan: Mapping[str, str],
    config: Config,
    layout: Layout,
    axes: Mapping[str, Axis],
    device: torch.device,
    shard_specs: dict[str, ShardSpec],
    partial_grads: list[str],
    tracer: ComputationTracer,
) -> dict[str, ShardSpec]:
    """Apply steps 1 to 6 to a stage. Return the shard specs so far with its own; append to `partial_grads`."""
    if not isinstance(module, Decoder):
        return shard_specs | apply_module_plan(module, plan, axes, partial_grads)
    seq_len = config.train.seq_len
    shard_specs |= name_head_weight(module)
    is_elastic = config.train.deterministic == "elastic"
    shard_specs |= apply_expert_parallel(module, axes, is_elastic=is_elastic, tracer=tracer)
    if not is_elastic:  # the kernel does not promise that the bits of a group are independent of the others
        apply_grouped_kernel(module, config.train.dtype, device)
    shard_specs |= apply_tensor_parallel(module, axes, len(get_local_positions(seq_len, axes)))
    apply_context_parallel(module, axes, seq_len)
    if config.data.packing == "documents":
        apply_document_attention(module, device)
    shard_specs |= apply_lora(module, _get_lora_spec(config), shard_specs)
    partial_grads += list_partial_grads(module, axes, shard_specs)  # before parameters are replaced by tiles
    # Replaces the specs of tiled weights by those of the tiles, so it returns all of them.
    # Rounding tiles to whole rows per rank saves padding, but then the sums over tiles depend on the number of ranks.
    num_ranks = 1 if config.train.deterministic == "elastic" else layout.dp_shard
    shard_specs = apply_tiling(module, _get_max_tile_elements(config, layout), num_ranks, shard_specs)
    apply_loss_chunks(module, config.train.loss_chunks, axes, is_compiled=config.train.compile is True)
    if config.train.dtype == "float8":
        apply_float8(
            module,
            include_head=config.train.float8_head,
            defers_wgrad=_defers_wgrad(layout),
            is_compiled=config.train.compile is True,
        )
    if computes_in_bf16(config.train.dtype):
        module.residual_dtype = get_residual_dtype(config.train, layout)
    return shard_specs


def _apply_checkpointing_and_compile(
    module: nn.Module, units: Sequence[nn.Module], config: Config, layout: Layout, *, keyed_randomness: bool
) -> None:
    """Apply step 8 to the units of a stage."""
    is_compiled = config.train.compile is True
    is_split = is_compiled and (not make_traceable(module) or _defers_wgrad(layout))
    if is_split:
        compile_blocks(units)
    policy, num_blocks = config.parallel.activation_checkpointing, config.parallel.recompute_layers
    apply_activation_checkpointing(units, policy, keyed_randomness=keyed_randomness, num_blocks=num_blocks)
    if is_compiled and not is_split:
        compile_blocks(units)


def describe_parallelism(config: Config, layout: Layout) -> list[str]:
    """Return one line per dimension and feature that `parallelize` applies, in its order."""
    settings, train, lora = config.parallel, config.train, config.lora
    layers = f", first {settings.recompute_layers} blocks of a stage" if settings.recompute_layers else ""
    tile_elements = _get_max_tile_elements(config, layout)
    applied = {
        f"expert parallelism over {layout.ep} ranks": layout.ep > 1,
        f"tensor parallelism over {layout.tp} ranks": layout.tp > 1,
        f"context parallelism over {layout.cp} ranks, {layout.ulysses} of them by Ulysses": layout.cp > 1,
        f"LoRA of rank {lora.rank}": lora.rank > 0,
        f"tiling into about {tile_elements} elements": tile_elements > 0,
        "float8 products of linear layers" + " and the head" * train.float8_head: train.dtype == "float8",
        f"activation checkpointing: {settings.activation_checkpointing}{layers}": settings.activation_checkpointing
        != "none",
        f"activation offload: {settings.activation_offload}": settings.activation_offload != "none",
        "deferred weight gradients": _defers_wgrad(layout),
        "compile": train.compile is True,
        f"ZeRO-{settings.zero} over {layout.dp_shard} ranks": layout.dp_shard > 1,
        f"state replicated over {layout.num_state_replicas} ranks (dp_replicate x cp)": layout.num_state_replicas > 1,
    }
    return [line for line, is_applied in applied.items() if is_applied]


def get_local_positions(seq_len: int, axes: Mapping[str, Axis]) -> list[int]:
    """Return the positions of a sequence that this rank reads: all of them without context parallelism."""
    ring, ulysses = axes.get("ring"), axes.get("ulysses")
    ring_size, ring_rank = (1, 0) if ring is None else (ring.size, ring.rank)
    ulysses_size, ulysses_rank = (1, 0) if ulysses is None else (ulysses.size, ulysses.rank)
    return get_rank_positions(seq_len, ring_size, ulysses_size, ring_rank, ulysses_rank)


def _freeze_parameters(
    module: nn.Module, groups: Sequence[ParameterGroupConfig], shard_specs: Mapping[str, ShardSpec]
) -> None:
    """Freeze the parameters that optimizer.groups freezes, so that nothing later allocates gradients for them."""
    for name, parameter in module.named_parameters():
        spec = shard_specs.get(name)
        if is_frozen(groups, name if spec is None else spec.name):
            parameter.requires_grad_(False)


def _defers_wgrad(layout: Layout) -> bool:
    """Return whether the pipeline schedule splits backward passes."""
    return layout.pp > 1 and layout.pipeline.splits_backward


def _get_lora_spec(config: Config) -> LoraSpec | None:
    lora = config.lora
    return LoraSpec(lora.rank, lora.alpha, tuple(lora.target_modules)) if lora.rank else None


def _get_max_tile_elements(config: Config, layout: Layout) -> int:
    """Return the most elements of a tile, unless one row per rank is more. 0: no tiling.

    A single shard is not tiled, unless it is to have the bits of several: the gradients of inputs are sums over tiles.
    """
    if layout.dp_shard == 1 and config.train.deterministic != "elastic":
        return 0
    return int(config.parallel.tile_mib * 2**20) // get_compute_itemsize(config.train.dtype)
