"""The one place that fixes the order in which dimensions wrap a model.

Stages of the pipeline are built apart; then each goes through tensor, context, tiles, recompute, deferral, compile,
data.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raytrain_hpc.config.schema import Config
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.lora import LoraSpec, apply_lora
from raytrain_hpc.parallel.activation_checkpoint import apply_activation_checkpointing
from raytrain_hpc.parallel.block_discovery import find_blocks
from raytrain_hpc.parallel.context_parallel import apply_context_parallel, get_rank_positions
from raytrain_hpc.parallel.ddp import DDPSync
from raytrain_hpc.parallel.deferred_wgrad import WeightGradStore
from raytrain_hpc.parallel.deterministic_reduce import DeterministicDDPSync, ReductionOrder
from raytrain_hpc.parallel.expert_parallel import apply_expert_parallel, get_expert_parameters
from raytrain_hpc.parallel.gradient_sync import CompositeSync, GradientSync, NoSync
from raytrain_hpc.parallel.mesh_axis import Axis, ExpertMesh
from raytrain_hpc.parallel.tensor_parallel import TensorParallelSpec, apply_tensor_parallel, get_head_weight_name
from raytrain_hpc.parallel.tied_gradients import all_reduce_gradients, sum_tied_gradients
from raytrain_hpc.parallel.tiled_linear import apply_tiling
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.state.shard_spec import ShardSpec


@dataclass
class ParallelModel:
    """The parts of a model that a rank has, made ready for a layout. Without a pipeline stage 0 is all of it."""

    modules: dict[int, nn.Module]  # by stage
    gradient_sync: GradientSync
    tensor_parallel: TensorParallelSpec = field(default_factory=TensorParallelSpec)
    axes: Mapping[str, Axis] = field(default_factory=dict)
    weight_grad_store: WeightGradStore = field(default_factory=WeightGradStore)

    def __post_init__(self) -> None:
        named = [pair for module in self.modules.values() for pair in module.named_parameters()]
        self.parameters: dict[str, nn.Parameter] = dict(named)  # by this rank's own names; DTensors where sharded
        if len(named) != len(self.parameters):
            raise ValueError("two stages of a rank have a parameter of the same name")

    @property
    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that are not frozen."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def get_shard_spec(self, name: str) -> ShardSpec:
        """What of the global tensor the parameter `name` is, before data parallelism shards it."""
        return self.tensor_parallel.shard_specs.get(name) or ShardSpec.from_shape(name, self.parameters[name].shape)

    def finish_grad_sync(self) -> None:
        """After the last backward pass of a step: make all gradients complete."""
        self.gradient_sync.finish_grad_sync()
        if "tp" in self.axes:
            all_reduce_gradients(
                [self.parameters[name] for name in self.tensor_parallel.partial_grads], self.axes["tp"]
            )
        # The table of the embedding, which the last stage of a pipeline can have a copy of.
        copies = [p for name, p in self.parameters.items() if self.get_shard_spec(name).name == "embedding.weight"]
        if len(copies) == 2:
            sum_tied_gradients(*copies)
        elif "tied" in self.axes:
            all_reduce_gradients(copies, self.axes["tied"])


def get_local_positions(seq_len: int, axes: Mapping[str, Axis]) -> list[int]:
    """The positions of a sequence that this rank reads."""
    ring, ulysses = axes.get("ring"), axes.get("ulysses")
    ring_at = (1, 0) if ring is None else (ring.size, ring.rank)
    ulysses_at = (1, 0) if ulysses is None else (ulysses.size, ulysses.rank)
    return get_rank_positions(seq_len, ring_at[0], ulysses_at[0], ring_at[1], ulysses_at[1])


def parallelize(
    modules: dict[int, nn.Module],
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
    axes: Mapping[str, Axis],
    expert_mesh: ExpertMesh | None,
    reduction_order: ReductionOrder | None,
    *,
    keyed_randomness: bool,
) -> ParallelModel:
    """Wrap the modules of this rank's stages for this layout and allocate them on `device`.

    Parameters on the meta device are left uninitialised: their values come afterwards, each rank filling what it
    holds, so that a model larger than a device is never whole anywhere. Axes that cut a model take Decoders there.
    """
    tensor, deferral = TensorParallelSpec(), WeightGradStore()
    blocks: dict[int, list[nn.Module]] = {}
    for stage, module in modules.items():
        if isinstance(module, Decoder):
            _apply_model_parallel(module, axes, config.train.seq_len, tensor)
            if config.train.lora_rank:
                train = config.train
                adapters = LoraSpec(train.lora_rank, train.lora_alpha, tuple(train.lora_targets))
                tensor.shard_specs |= apply_lora(module, adapters)
            if config.parallel.tile_mib and layout.dp_shard > 1:
                apply_tiling(module, _get_tile_elements(config), layout.dp_shard, tensor.shard_specs)
        blocks[stage] = list(module.blocks().values()) if isinstance(module, Decoder) else find_blocks(module)
        apply_activation_checkpointing(
            blocks[stage] or [module], config.parallel.recompute, keyed_randomness=keyed_randomness
        )
        if layout.pp > 1 and layout.pipeline.splits_backward:
            deferral.attach(module)
        if config.train.compile:
            for block in blocks[stage] or [module]:
                block.compile()
    data = _apply_data_parallel(modules, blocks, config, layout, mesh, device, expert_mesh, reduction_order)
    return ParallelModel(modules, data, tensor, axes, deferral)


def _apply_model_parallel(decoder: Decoder, axes: Mapping[str, Axis], seq_len: int, tensor: TensorParallelSpec) -> None:
    if "ep" in axes or "tp" in axes:
        apply_expert_parallel(decoder, axes, tensor.shard_specs)
    if "tp" in axes:
        with torch.device("meta"):
            apply_tensor_parallel(decoder, axes["tp"], len(get_local_positions(seq_len, axes)), tensor)
    elif decoder.head is not None and decoder.head.weight is not None:
        tensor.shard_specs["head.weight"] = ShardSpec.from_shape(
            get_head_weight_name(decoder.spec), decoder.head.weight.shape
        )
    if "ring" in axes or "ulysses" in axes:
        apply_context_parallel(decoder, axes, seq_len)


def _apply_data_parallel(
    modules: dict[int, nn.Module],
    blocks: dict[int, list[nn.Module]],
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
    expert_mesh: ExpertMesh | None,
    reduction_order: ReductionOrder | None,
) -> GradientSync:
    apart = {} if expert_mesh is None else get_expert_parameters(modules.values())
    parts: list[GradientSync] = []
    if mesh is not None and layout.dp_shard > 1:
        from raytrain_hpc.parallel.fsdp import FSDPSync  # 40 MiB of FSDP2 that other layouts do not pay

        axes = ("copies", "dp_shard") if layout.num_state_replicas > 1 else ("dp_shard",)
        of_experts = None if expert_mesh is None else expert_mesh.mesh
        settings, dtype = config.parallel, config.train.dtype
        parts.append(FSDPSync(modules, blocks, mesh[axes], settings, dtype, apart, of_experts, reduction_order))
        if of_experts is not None:
            apart = {}
        for module in modules.values():
            module.to_empty(device=device) if _is_meta(module) else module.to(device)
    else:
        for module in modules.values():
            _allocate_parameters(module, device) if _is_meta(module) else module.to(device)
    named = dict(pair for module in modules.values() for pair in module.named_parameters())
    if reduction_order is not None and layout.dp_shard == 1:
        group = mesh["copies"].get_group() if mesh is not None and layout.num_state_replicas > 1 else None
        by_stage = {stage: dict(module.named_parameters()) for stage, module in modules.items()}
        parts.append(DeterministicDDPSync(by_stage, group, reduction_order.replicas, config.parallel.bucket_mib))
    elif mesh is not None and layout.num_state_replicas > 1 and layout.dp_shard == 1:
        dense = {name: parameter for name, parameter in named.items() if name not in apart}
        parts.append(DDPSync(dense, mesh["copies"].get_group(), config.parallel.bucket_mib))
    if apart and expert_mesh is not None and expert_mesh.replica_group is not None:
        copied = {name: named[name] for name in apart}
        parts.append(DDPSync(copied, expert_mesh.replica_group, config.parallel.bucket_mib))
    if len(parts) > 1:
        return CompositeSync(parts)
    return parts[0] if parts else NoSync()


def _get_tile_elements(config: Config) -> int:
    width = 2 if config.train.dtype == "bf16" else get_param_dtype(config.train.dtype).itemsize
    return int(config.parallel.tile_mib * 2**20) // width


def _is_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Storage for plain parameters on the meta device. `Module.to_empty` would import SymPy: 0.3 s a worker."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, meta in part.named_parameters(recurse=False):
            if meta not in made:
                storage = torch.empty(meta.shape, dtype=meta.dtype, device=device)
                made[meta] = nn.Parameter(storage, requires_grad=meta.requires_grad)
            part.register_parameter(name, made[meta])
        for name, buffer in part.named_buffers(recurse=False):
            part.register_buffer(
                name, torch.empty_like(buffer, device=device), name not in part._non_persistent_buffers_set
            )


def get_param_dtype(dtype: str) -> torch.dtype:
    """The dtype in which parameters are kept: bf16 runs keep fp32."""
    return torch.float64 if dtype == "fp64" else torch.float32


def get_residual_dtype(dtype: str, layout: Layout) -> torch.dtype:
    """The dtype of the residual stream between stages: autocast leaves it in fp32, FSDP2 does not."""
    return torch.bfloat16 if dtype == "bf16" and layout.dp_shard > 1 else get_param_dtype(dtype)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """bf16 compute over fp32 weights; nothing for the other types."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16")


__all__ = ["ParallelModel", "autocast", "get_param_dtype", "get_local_positions", "parallelize", "get_residual_dtype"]
