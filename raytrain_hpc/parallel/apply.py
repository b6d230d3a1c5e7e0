"""The one place that fixes the order in which dimensions wrap a model: tensor, context, recompute, compile, data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from raytrain_hpc.config import Config
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.parallel.axis import Axis
from raytrain_hpc.parallel.blocks import blocks_of
from raytrain_hpc.parallel.context import held_positions, spread
from raytrain_hpc.parallel.recompute import recompute
from raytrain_hpc.parallel.replicate import Alone, Replicated
from raytrain_hpc.parallel.tensor import TensorParallel, share_out
from raytrain_hpc.plan.layout import Layout
from raytrain_hpc.state.cut import Cut
from raytrain_hpc.state.holding import local


class DataParallel(Protocol):
    """A model under one way of data parallelism."""

    forward: nn.Module  # called for a forward pass
    parameters: dict[str, nn.Parameter]  # name -> what this rank holds of it (DTensor where sharded)

    def microbatch(self, *, first: bool, last: bool) -> AbstractContextManager[None]:
        """The context in which one microbatch's forward and backward pass run."""


@dataclass
class Parallel:
    """A model made ready for a layout."""

    data: DataParallel
    tensor: TensorParallel = field(default_factory=TensorParallel)
    tensor_axis: Axis | None = None

    @property
    def forward(self) -> nn.Module:
        """What is called for a forward pass."""
        return self.data.forward

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By this rank's own names."""
        return self.data.parameters

    def cut(self, name: str) -> Cut:
        """What of the global tensor the parameter `name` is, before data parallelism shards it."""
        return self.tensor.cuts.get(name) or Cut.whole(name, self.parameters[name].shape)

    @contextmanager
    def microbatch(self, *, first: bool, last: bool) -> Iterator[None]:
        """The context in which one microbatch's forward and backward pass run; after the last one of a step all
        gradients are complete."""
        with self.data.microbatch(first=first, last=last):
            yield
        if last and self.tensor_axis is not None:
            self._complete(self.tensor_axis)

    def _complete(self, axis: Axis) -> None:
        gradients = [self.parameters[name].grad for name in self.tensor.partial]
        slices = [local(gradient) for gradient in gradients if gradient is not None]
        summed = axis.sum(torch.cat([piece.reshape(-1) for piece in slices]))
        parts = torch.split(summed, [piece.numel() for piece in slices])
        torch._foreach_copy_(slices, [part.view_as(piece) for part, piece in zip(parts, slices, strict=True)])


def own_positions(seq_len: int, axes: Mapping[str, Axis]) -> list[int]:
    """The positions of a sequence that this rank reads."""
    ring, ulysses = axes.get("ring"), axes.get("ulysses")
    ring_at = (1, 0) if ring is None else (ring.size, ring.rank)
    ulysses_at = (1, 0) if ulysses is None else (ulysses.size, ulysses.rank)
    return held_positions(seq_len, ring_at[0], ulysses_at[0], ring_at[1], ulysses_at[1])


def parallelise(
    module: nn.Module,
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
    axes: Mapping[str, Axis],
    *,
    keyed_randomness: bool,
) -> Parallel:
    """Wrap `module` for this layout and allocate it on `device`.

    Parameters on the meta device are left uninitialised: their values come afterwards, each rank filling what it
    holds, so that a model larger than a device is never whole anywhere. Axes that cut a model take a Decoder there.
    """
    tensor, seq_len = TensorParallel(), config.train.seq_len
    if isinstance(module, Decoder):
        if "tp" in axes:
            with torch.device("meta"):
                tensor = share_out(module, axes["tp"], len(own_positions(seq_len, axes)))
        if "ring" in axes or "ulysses" in axes:
            spread(module, axes, seq_len)
    blocks = blocks_of(module)
    recompute(blocks or [module], config.parallel.recompute, keyed_randomness=keyed_randomness)
    if config.train.compile:
        for block in blocks or [module]:
            block.compile()
    return Parallel(_data_parallel(module, blocks, config, layout, mesh, device), tensor, axes.get("tp"))


def _data_parallel(
    module: nn.Module,
    blocks: list[nn.Module],
    config: Config,
    layout: Layout,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> DataParallel:
    if mesh is not None and layout.dp_shard > 1:
        from raytrain_hpc.parallel.shard import Sharded  # 40 MiB of FSDP2 that other layouts do not pay

        axes = ("copies", "dp_shard") if layout.copies > 1 else ("dp_shard",)
        sharded = Sharded(module, blocks, mesh[axes], layout.zero, config.train.dtype)
        module.to_empty(device=device) if _is_meta(module) else module.to(device)
        return sharded
    _allocate(module, device) if _is_meta(module) else module.to(device)
    if mesh is None or layout.copies == 1:
        return Alone(module)
    return Replicated(module, mesh["copies"].get_group(), config.parallel.bucket_mib)


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


__all__ = ["DataParallel", "Parallel", "autocast", "compute_type", "own_positions", "parallelise"]
