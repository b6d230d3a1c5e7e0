"""The one place that fixes the order in which dimensions wrap a model: recompute, compile, data parallel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raytrain_hpc.config import Config
from raytrain_hpc.parallel.blocks import blocks_of
from raytrain_hpc.parallel.recompute import recompute
from raytrain_hpc.parallel.replicate import Alone, Replicated
from raytrain_hpc.plan.layout import Layout


class Parallel(Protocol):
    """A model made ready for a layout."""

    forward: nn.Module  # called for a forward pass
    parameters: dict[str, nn.Parameter]  # canonical name -> what this rank holds of it (DTensor where sharded)

    def microbatch(self, *, first: bool, last: bool) -> AbstractContextManager[None]:
        """The context in which one microbatch's forward and backward pass run."""


def parallelise(
    module: nn.Module,
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    keyed_randomness: bool,
) -> Parallel:
    """Wrap `module` for this layout and allocate it on `device`.

    Parameters on the meta device are left uninitialised: their values come afterwards, each rank filling what it
    holds, so that a model larger than a device is never whole anywhere.
    """
    blocks = blocks_of(module)
    recompute(blocks or [module], config.parallel.recompute, keyed_randomness=keyed_randomness)
    if config.train.compile:
        for block in blocks or [module]:
            block.compile()
    if mesh is not None and layout.dp_shard > 1:
        from raytrain_hpc.parallel.shard import Sharded  # 40 MiB of FSDP2 that other layouts do not pay

        axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
        sharded = Sharded(module, blocks, mesh[axes], layout.zero, config.train.dtype)
        module.to_empty(device=device) if _is_meta(module) else module.to(device)
        return sharded
    _allocate(module, device) if _is_meta(module) else module.to(device)
    if mesh is None:
        return Alone(module)
    group = mesh["dp_replicate"].get_group()
    return Replicated(module, group, config.parallel.bucket_mib)


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


def compute_type(dtype: str) -> torch.dtype:
    """The dtype in which parameters are kept: bf16 runs keep fp32."""
    return torch.float64 if dtype == "fp64" else torch.float32


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """bf16 compute over fp32 weights; nothing for the other types."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bf16")


__all__ = ["Parallel", "autocast", "compute_type", "parallelise"]
