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
from raytrain_hpc.model.lora import Adapters, adapt
from raytrain_hpc.parallel.activation_checkpoint import recompute
from raytrain_hpc.parallel.block_discovery import blocks_of
from raytrain_hpc.parallel.context_parallel import held_positions, spread
from raytrain_hpc.parallel.ddp import Replicated
from raytrain_hpc.parallel.deferred_wgrad import Deferral
from raytrain_hpc.parallel.deterministic_reduce import Canonical, CanonicalReplicas
from raytrain_hpc.parallel.expert_parallel import expert_parameters, place_experts
from raytrain_hpc.parallel.gradient_sync import Alone, DataParallel, Several
from raytrain_hpc.parallel.mesh_axis import Axis, ExpertMesh
from raytrain_hpc.parallel.tensor_parallel import TensorParallel, head_name, share_out
from raytrain_hpc.parallel.tied_gradients import sum_over_ranks, sum_two_copies
from raytrain_hpc.parallel.tiled_linear import tile
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.state.shard_spec import Cut


@dataclass
class Parallel:
    """The parts of a model that a rank has, made ready for a layout. Without a pipeline stage 0 is all of it."""

    modules: dict[int, nn.Module]  # by stage
    data: DataParallel
    tensor: TensorParallel = field(default_factory=TensorParallel)
    axes: Mapping[str, Axis] = field(default_factory=dict)
    deferral: Deferral = field(default_factory=Deferral)

    def __post_init__(self) -> None:
        named = [pair for module in self.modules.values() for pair in module.named_parameters()]
        self.parameters: dict[str, nn.Parameter] = dict(named)  # by this rank's own names; DTensors where sharded
        if len(named) != len(self.parameters):
            raise ValueError("two stages of a rank have a parameter of the same name")

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that are not frozen."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def cut(self, name: str) -> Cut:
        """What of the global tensor the parameter `name` is, before data parallelism shards it."""
        return self.tensor.cuts.get(name) or Cut.whole(name, self.parameters[name].shape)

    def finish(self) -> None:
        """After the last backward pass of a step: make all gradients complete."""
        self.data.finish()
        if "tp" in self.axes:
            sum_over_ranks([self.parameters[name] for name in self.tensor.partial], self.axes["tp"])
        # The table of the embedding, which the last stage of a pipeline can have a copy of.
        copies = [p for name, p in self.parameters.items() if self.cut(name).name == "embedding.weight"]
        if len(copies) == 2:
            sum_two_copies(*copies)
        elif "tied" in self.axes:
            sum_over_ranks(copies, self.axes["tied"])


def own_positions(seq_len: int, axes: Mapping[str, Axis]) -> list[int]:
    """The positions of a sequence that this rank reads."""
    ring, ulysses = axes.get("ring"), axes.get("ulysses")
    ring_at = (1, 0) if ring is None else (ring.size, ring.rank)
    ulysses_at = (1, 0) if ulysses is None else (ulysses.size, ulysses.rank)
    return held_positions(seq_len, ring_at[0], ulysses_at[0], ring_at[1], ulysses_at[1])


def parallelise(
    modules: dict[int, nn.Module],
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
    axes: Mapping[str, Axis],
    experts: ExpertMesh | None,
    canonical: Canonical | None,
    *,
    keyed_randomness: bool,
) -> Parallel:
    """Wrap the modules of this rank's stages for this layout and allocate them on `device`.

    Parameters on the meta device are left uninitialised: their values come afterwards, each rank filling what it
    holds, so that a model larger than a device is never whole anywhere. Axes that cut a model take Decoders there.
    """
    tensor, deferral = TensorParallel(), Deferral()
    blocks: dict[int, list[nn.Module]] = {}
    for stage, module in modules.items():
        if isinstance(module, Decoder):
            _cut(module, axes, config.train.seq_len, tensor)
            if config.train.lora_rank:
                train = config.train
                adapters = Adapters(train.lora_rank, train.lora_alpha, tuple(train.lora_targets))
                tensor.cuts |= adapt(module, adapters)
            if config.parallel.tile_mib and layout.dp_shard > 1:
                tile(module, _tile_elements(config), layout.dp_shard, tensor.cuts)
        blocks[stage] = list(module.blocks().values()) if isinstance(module, Decoder) else blocks_of(module)
        recompute(blocks[stage] or [module], config.parallel.recompute, keyed_randomness=keyed_randomness)
        if layout.pp > 1 and layout.pipeline.splits_backward:
            deferral.attach(module)
        if config.train.compile:
            for block in blocks[stage] or [module]:
                block.compile()
    data = _data_parallel(modules, blocks, config, layout, mesh, device, experts, canonical)
    return Parallel(modules, data, tensor, axes, deferral)


def _cut(decoder: Decoder, axes: Mapping[str, Axis], seq_len: int, tensor: TensorParallel) -> None:
    if "ep" in axes or "tp" in axes:
        place_experts(decoder, axes, tensor.cuts)
    if "tp" in axes:
        with torch.device("meta"):
            share_out(decoder, axes["tp"], len(own_positions(seq_len, axes)), tensor)
    elif decoder.head is not None and decoder.head.weight is not None:
        tensor.cuts["head.weight"] = Cut.whole(head_name(decoder.shape), decoder.head.weight.shape)
    if "ring" in axes or "ulysses" in axes:
        spread(decoder, axes, seq_len)


def _data_parallel(
    modules: dict[int, nn.Module],
    blocks: dict[int, list[nn.Module]],
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
    experts: ExpertMesh | None,
    canonical: Canonical | None,
) -> DataParallel:
    apart = {} if experts is None else expert_parameters(modules.values())
    parts: list[DataParallel] = []
    if mesh is not None and layout.dp_shard > 1:
        from raytrain_hpc.parallel.fsdp import Sharded  # 40 MiB of FSDP2 that other layouts do not pay

        axes = ("copies", "dp_shard") if layout.copies > 1 else ("dp_shard",)
        of_experts = None if experts is None else experts.mesh
        settings, dtype = config.parallel, config.train.dtype
        parts.append(Sharded(modules, blocks, mesh[axes], settings, dtype, apart, of_experts, canonical))
        if of_experts is not None:
            apart = {}
        for module in modules.values():
            module.to_empty(device=device) if _is_meta(module) else module.to(device)
    else:
        for module in modules.values():
            _allocate(module, device) if _is_meta(module) else module.to(device)
    named = dict(pair for module in modules.values() for pair in module.named_parameters())
    if canonical is not None and layout.dp_shard == 1:
        group = mesh["copies"].get_group() if mesh is not None and layout.copies > 1 else None
        by_stage = {stage: dict(module.named_parameters()) for stage, module in modules.items()}
        parts.append(CanonicalReplicas(by_stage, group, canonical.copies, config.parallel.bucket_mib))
    elif mesh is not None and layout.copies > 1 and layout.dp_shard == 1:
        dense = {name: parameter for name, parameter in named.items() if name not in apart}
        parts.append(Replicated(dense, mesh["copies"].get_group(), config.parallel.bucket_mib))
    if apart and experts is not None and experts.copies is not None:
        copied = {name: named[name] for name in apart}
        parts.append(Replicated(copied, experts.copies, config.parallel.bucket_mib))
    if len(parts) > 1:
        return Several(parts)
    return parts[0] if parts else Alone()


def _tile_elements(config: Config) -> int:
    width = 2 if config.train.dtype == "bf16" else compute_type(config.train.dtype).itemsize
    return int(config.parallel.tile_mib * 2**20) // width


def _is_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _allocate(module: nn.Module, device: torch.device) -> None:
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


def compute_type(dtype: str) -> torch.dtype:
    """The dtype in which parameters are kept: bf16 runs keep fp32."""
    return torch.float64 if dtype == "fp64" else torch.float32


def stream_type(dtype: str, layout: Layout) -> torch.dtype:
    """The dtype of the residual stream between stages: autocast leaves it in fp32, FSDP2 does not."""
    return torch.bfloat16 if dtype == "bf16" and layout.dp_shard > 1 else compute_type(dtype)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """bf16 compute over fp32 weights; nothing for the other types."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16")


__all__ = ["Parallel", "autocast", "compute_type", "own_positions", "parallelise", "stream_type"]
