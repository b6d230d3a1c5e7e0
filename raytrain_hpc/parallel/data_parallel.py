"""Data parallelism over the stages of a rank: FSDP2, or replicas with DDP, each with a deterministic form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raytrain_hpc.config.schema import Config
from raytrain_hpc.parallel.ddp import DDPSync
from raytrain_hpc.parallel.deterministic_reduce import DeterministicDDPSync, ReductionOrder
from raytrain_hpc.parallel.expert_parallel import get_expert_parameters
from raytrain_hpc.parallel.gradient_sync import CompositeSync, GradientSync, NoSync
from raytrain_hpc.parallel.mesh_axis import ExpertMesh
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.torch_private import is_persistent_buffer


def apply_data_parallel(
    stages: Mapping[int, nn.Module],
    blocks: Mapping[int, Sequence[nn.Module]],
    *,
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
    expert_mesh: ExpertMesh | None,
    reduction_order: ReductionOrder | None,
) -> GradientSync:
    """Shard or replicate the parameters of all stages, allocate them on `device`, and return their gradient sync.

    Call last: it needs the final parameters. `blocks`: the units of sharding of each stage. `expert_mesh`: the ranks
    that share an expert, None without expert parallelism. `reduction_order`: fixes the order of gradient additions
    (train.deterministic=elastic), None leaves it unspecified.
    """
    replica_group = mesh["copies"].get_group() if mesh is not None and layout.num_state_replicas > 1 else None
    bucket_mib = config.parallel.bucket_mib
    expert_names = [] if expert_mesh is None else list(get_expert_parameters(stages.values()))
    syncs: list[GradientSync] = []
    if mesh is not None and layout.dp_shard > 1:
        syncs.append(_apply_fsdp(stages, blocks, config, layout, mesh, expert_mesh, reduction_order))
        if expert_mesh is not None and expert_mesh.mesh is not None:
            expert_names = []  # FSDP2 shards them too
        for module in stages.values():
            module.to_empty(device=device) if _is_meta(module) else module.to(device)
    else:
        for module in stages.values():
            _allocate_parameters(module, device) if _is_meta(module) else module.to(device)
        if reduction_order is not None:
            by_stage = {stage: dict(module.named_parameters()) for stage, module in stages.items()}
            syncs.append(DeterministicDDPSync(by_stage, replica_group, reduction_order.replicas, bucket_mib))
        elif replica_group is not None:
            dense = {name: p for name, p in _get_parameters(stages).items() if name not in expert_names}
            syncs.append(DDPSync(dense, replica_group, bucket_mib))
    if expert_names and expert_mesh is not None and expert_mesh.replica_group is not None:
        parameters = _get_parameters(stages)  # allocation has replaced them
        experts = {name: parameters[name] for name in expert_names}
        syncs.append(DDPSync(experts, expert_mesh.replica_group, bucket_mib))
    if len(syncs) > 1:
        return CompositeSync(syncs)
    return syncs[0] if syncs else NoSync()


def _apply_fsdp(
    stages: Mapping[int, nn.Module],
    blocks: Mapping[int, Sequence[nn.Module]],
    config: Config,
    layout: Layout,
    mesh: DeviceMesh,
    expert_mesh: ExpertMesh | None,
    reduction_order: ReductionOrder | None,
) -> GradientSync:
    from raytrain_hpc.parallel.fsdp import FSDPSync  # 40 MiB of FSDP2, which other layouts do not need

    mesh_axes = ("copies", "dp_shard") if layout.num_state_replicas > 1 else ("dp_shard",)
    experts = {} if expert_mesh is None else get_expert_parameters(stages.values())
    shard_mesh = None if expert_mesh is None else expert_mesh.mesh
    settings, dtype = config.parallel, config.train.dtype
    return FSDPSync(stages, blocks, mesh[mesh_axes], settings, dtype, experts, shard_mesh, reduction_order)


def _get_parameters(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    return dict(pair for module in stages.values() for pair in module.named_parameters())


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
