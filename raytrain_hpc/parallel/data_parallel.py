"""Data parallelism over the stages of a rank: FSDP2, or replicas with DDP, each with a deterministic form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raytrain_hpc.config.schema import Config
from raytrain_hpc.config.training_config import computes_in_bf16
from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.parallel.block_discovery import exclude_shared
from raytrain_hpc.parallel.computation_trace import ComputationTracer, ContributionTrace, describe_gradients
from raytrain_hpc.parallel.ddp import AllReduceBucket, DDPSync, GradientBucket
from raytrain_hpc.parallel.deferred_wgrad import WeightGradStore
from raytrain_hpc.parallel.deterministic_reduce import PairwiseBucket
from raytrain_hpc.parallel.expert_parallel import get_expert_parameters
from raytrain_hpc.parallel.gradient_sync import CompositeSync, GradientSync, NoSync
from raytrain_hpc.parallel.mesh_axis import ExpertMesh
from raytrain_hpc.parallel.reduction_order import ReductionOrder, ReductionOrders
from raytrain_hpc.parallel.source_gradients import SourceGradients, get_source_gradients
from raytrain_hpc.parallel.weight_copies import WeightCopies
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.workload import copies_all_weights, keeps_weight_copies
from raytrain_hpc.torch_private import is_persistent_buffer
from raytrain_hpc.torch_private_fsdp import cast_inputs_to_bf16


def apply_data_parallel(
    stages: Mapping[int, nn.Module],
    blocks: Mapping[int, Sequence[nn.Module]],
    *,
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
    expert_mesh: ExpertMesh | None,
    reduction_orders: ReductionOrders | None,
    weight_grad_store: WeightGradStore | None,
    weight_copies: WeightCopies,
    tracer: ComputationTracer,
) -> GradientSync:
    """Shard or replicate the parameters of all stages, allocate them on `device`, and return their gradient sync.

    Call last: it needs the final parameters. `blocks`: the units of sharding of each stage. `expert_mesh`: the ranks
    that share an expert, None without expert parallelism. `reduction_orders`: fix the order of gradient additions
    (train.deterministic=elastic), None leaves it unspecified. `weight_grad_store`: of schedules that split backward
    passes. `weight_copies`: gets copies if there are to be any. `tracer`: traces gradients whose order is fixed. Raises
    ModelError for a parameter that ZeRO cannot shard.
    """
    if config.parallel.zero:  # on one rank too: the run may grow
        for module in stages.values():
            _make_shardable(module, config.parallel.zero)
    replica_group = mesh["copies"].get_group() if mesh is not None and layout.num_state_replicas > 1 else None
    bucket_mib = config.parallel.bucket_mib
    expert_names = set() if expert_mesh is None else set(get_expert_parameters(stages.values()))
    dense_order = expert_order = source_gradients = None
    if reduction_orders is not None:
        dense_order, expert_order = reduction_orders.dense, reduction_orders.experts
    if expert_order is not None:
        source_gradients = get_source_gradients(stages, layout.ep, weight_grad_store)
    syncs: list[GradientSync] = []
    if mesh is not None and layout.dp_shard > 1:
        orders, sources = reduction_orders, source_gradients
        syncs.append(_apply_fsdp(stages, blocks, config, layout, mesh, expert_mesh, orders, sources, tracer))
        if expert_mesh is not None and expert_mesh.mesh is not None:
            expert_names = set()  # FSDP2 shards them too
        for module in stages.values():
            module.to_empty(device=device) if _is_meta(module) else module.to(device)
    else:
        for module in stages.values():
            _allocate_parameters(module, device) if _is_meta(module) else module.to(device)
        _copy_weights(stages, blocks, weight_copies, config, layout)
        dense = _get_weights(stages, lambda name: name not in expert_names, weight_copies)
        if make_bucket := _get_bucket_factory(replica_group, dense_order, dense, tracer):
            syncs.append(DDPSync(dense, make_bucket, bucket_mib, weight_copies.get_module_parameter))
    if expert_names and expert_mesh is not None:
        experts = _get_weights(stages, expert_names.__contains__, weight_copies)
        group = expert_mesh.replica_group
        if make_bucket := _get_bucket_factory(group, expert_order, experts, tracer, source_gradients):
            syncs.append(DDPSync(experts, make_bucket, bucket_mib, weight_copies.get_module_parameter))
    if len(syncs) > 1:
        return CompositeSync(syncs)
    return syncs[0] if syncs else NoSync()


def _get_bucket_factory(
    group: dist.ProcessGroup | None,
    order: ReductionOrder | None,
    parameters: Mapping[int, Mapping[str, nn.Parameter]],
    tracer: ComputationTracer,
    source_gradients: SourceGradients | None = None,
) -> Callable[[list[nn.Parameter]], GradientBucket] | None:
    """Return a function that makes the buckets of parameters replicated over a group; None: nothing is to be summed.

    `source_gradients`: has the gradients of `parameters`, which are those of experts.
    """
    if order is None:
        return None if group is None else partial(AllReduceBucket, group=group)
    names = {parameter: name for named in parameters.values() for name, parameter in named.items()}

    def make_bucket(members: list[nn.Parameter]) -> PairwiseBucket:
        member_names = [names[parameter] for parameter in members]
        take_gradients = None if source_gradients is None else partial(source_gradients.take, member_names)
        label, of_experts = describe_gradients(member_names), source_gradients is not None
        trace = ContributionTrace(tracer, label, tuple(member_names), of_experts)
        return PairwiseBucket(members, group, order, take_gradients, trace=trace)

    return make_bucket


def _apply_fsdp(
    stages: Mapping[int, nn.Module],
    blocks: Mapping[int, Sequence[nn.Module]],
    config: Config,
    layout: Layout,
    mesh: DeviceMesh,
    expert_mesh: ExpertMesh | None,
    reduction_orders: ReductionOrders | None,
    source_gradients: SourceGradients | None,
    tracer: ComputationTracer,
) -> GradientSync:
    # 40 MiB of FSDP2, which other layouts do not need
    from raytrain_hpc.parallel.fsdp import FSDPSync, build_reshard_mesh

    mesh_axes = ("copies", "dp_shard") if layout.num_state_replicas > 1 else ("dp_shard",)
    experts = {} if expert_mesh is None else get_expert_parameters(stages.values())
    shard_mesh = None if expert_mesh is None else expert_mesh.mesh
    settings, dtype = config.parallel, config.train.dtype
    return FSDPSync(
        stages,
        blocks,
        mesh[mesh_axes],
        settings,
        dtype,
        experts,
        expert_mesh=shard_mesh,
        reshard_mesh=build_reshard_mesh(mesh, settings.reshard_over),
        reduction_orders=reduction_orders,
        source_gradients=source_gradients,
        tracer=tracer,
    )


def _make_shardable(module: nn.Module, zero_stage: int) -> None:
    """Make the parameters of a user's module contiguous. Raises ModelError for those that FSDP2 cannot shard."""
    named = dict(module.named_parameters())
    storages = Counter(parameter.untyped_storage().data_ptr() for parameter in named.values() if not parameter.is_meta)
    for name, parameter in named.items():
        if parameter.ndim == 0:
            raise ModelError(
                f"parallel.zero={zero_stage}: parameter {name!r} of the model has no dimensions, so that it cannot be "
                "sharded; give it the shape [1], as in nn.Parameter(torch.ones(1)), or set parallel.zero=0"
            )
        if parameter.is_contiguous():
            continue
        if storages[parameter.untyped_storage().data_ptr()] > 1:
            raise ModelError(
                f"parallel.zero={zero_stage}: parameter {name!r} of the model is a view of memory that another "
                "parameter has too; use one nn.Parameter in both places, or set parallel.zero=0"
            )
        parameter.data = parameter.data.contiguous()


def _copy_weights(
    stages: Mapping[int, nn.Module],
    blocks: Mapping[int, Sequence[nn.Module]],
    weight_copies: WeightCopies,
    config: Config,
    layout: Layout,
) -> None:
    train, settings = config.train, config.parallel
    is_bf16, is_quantized = computes_in_bf16(train.dtype), settings.quantize in ("weights", "both")
    elastic = train.deterministic == "elastic"
    if copies_all_weights(train.weight_copies, train.dtype, layout, elastic=elastic, quantized=is_quantized):
        for stage, module in stages.items():
            weight_copies.replace_all_weights(module, torch.bfloat16 if is_bf16 else None, is_quantized=is_quantized)
            if is_bf16 and not isinstance(module, Decoder):
                for unit in (*exclude_shared(blocks[stage], module), module):
                    unit.register_forward_pre_hook(cast_inputs_to_bf16, with_kwargs=True)
        return
    copies = keeps_weight_copies(train.weight_copies, train.dtype, layout, settings.activation_checkpointing)
    copies_dense, copies_experts = copies
    if copies_dense or copies_experts:
        for module in stages.values():
            weight_copies.replace_weights(module, include_float8=copies_dense)


def _get_weights(
    stages: Mapping[int, nn.Module], is_selected: Callable[[str], bool], weight_copies: WeightCopies
) -> dict[int, dict[str, nn.Parameter]]:
    """Return the weights of the modules' parameters by stage and name."""
    return {
        stage: {
            name: weight_copies.get_weight(parameter)
            for name, parameter in module.named_parameters()
            if is_selected(name)
        }
        for stage, module in stages.items()
    }


def _is_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Allocate the parameters and buffers of a module on the meta device, uninitialized; tied ones stay tied.

    `Module.to_empty` would do the same, but imports SymPy, which takes 0.3 s per worker.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for submodule in module.modules():
        for name, meta in submodule.named_parameters(recurse=False):
            if meta not in allocated:
                storage = torch.empty(meta.shape, dtype=meta.dtype, device=device)
                allocated[meta] = nn.Parameter(storage, requires_grad=meta.requires_grad)
            submodule.register_parameter(name, allocated[meta])
        for name, buffer in submodule.named_buffers(recurse=False):
            empty = torch.empty_like(buffer, device=device)
            submodule.register_buffer(name, empty, is_persistent_buffer(submodule, name))
