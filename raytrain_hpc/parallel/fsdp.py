"""ZeRO-1, 2, 3 and HSDP by FSDP2: state sharded by rows over dp_shard, replicated over dp_replicate.

The stage only says what is kept between the microbatches of a step:

| stage | weights gathered | gradients reduce-scattered |
| --- | --- | --- |
| 1 | once a step, kept until its last backward | once a step, after the last microbatch |
| 2 | once a step, kept until its last backward | after every microbatch |
| 3 | for every forward and backward | after every microbatch |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from raytrain_hpc.config.schema import ParallelConfig
from raytrain_hpc.model.moe import Experts
from raytrain_hpc.parallel.deterministic_reduce import DeterministicReduceScatter, MicrobatchCursor, ReductionOrder
from raytrain_hpc.parallel.quantized_collectives import QuantizedAllGather, QuantizedReduceScatter, QuantizedTraffic
from raytrain_hpc.parallel.tiled_linear import TiledLinear


class FSDPSync:
    """Modules under FSDP2, by pipeline stage. Their parameters are DTensors, the same objects for their whole life."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        blocks: Mapping[int, Sequence[nn.Module]],
        mesh: DeviceMesh,
        settings: ParallelConfig,
        dtype: str,
        experts: Mapping[str, nn.Parameter],
        expert_mesh: DeviceMesh | None,
        reduction_order: ReductionOrder | None,
    ):
        """`mesh`: copies, where there are several, and dp_shard. `experts`: parameters that are not sharded over it,
        but over `expert_mesh` where there is one. `canonical`: in which order gradients are added, None: in any.
        """
        self._zero_stage, self._cursor = settings.zero, MicrobatchCursor()
        self._reduces_each_microbatch = (
            settings.zero > 1 or reduction_order is not None
        )  # reduced after every microbatch
        copies = mesh["copies"].get_group() if mesh.ndim == 2 else None
        if reduction_order is not None:  # sums over copies are then its own affair
            mesh = mesh["dp_shard"]
        self._is_hsdp = mesh.ndim == 2
        ignored = set(experts.values()) if expert_mesh is None else set()
        policy = MixedPrecisionPolicy()
        if dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard = partial(_fully_shard, policy=policy, ignored=ignored, settings=settings)
        for module in modules.values():
            for part in module.modules():
                if isinstance(part, Experts) and expert_mesh is not None:
                    shard(part, mesh=expert_mesh)
        self._modules = {stage: _shard_module(module, blocks[stage], mesh, shard) for stage, module in modules.items()}
        self.quantized_traffic = QuantizedTraffic()  # what went through quantised collectives
        _apply_quantization([*modules.values()], settings.quantize, self.quantized_traffic)
        if reduction_order is not None:
            for unit in _iter_fsdp_modules(modules.values()):
                reduce = DeterministicReduceScatter(
                    self._cursor, reduction_order.shards, reduction_order.replicas, copies
                )
                unit.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
                unit.set_all_reduce_hook(reduce.all_reduce_hook)

    @contextmanager
    def backward_context(self, stage: int, microbatch: int, *, is_last: bool, split: bool = False) -> Iterator[None]:
        """Set what FSDP2 does around this backward pass of a stage.

        A split one leaves gradients of weights for later, so nothing is reduced before `weights_done`.
        """
        self._cursor.microbatch, self._cursor.is_last = microbatch, is_last
        self._configure(
            self._modules[stage], is_last=is_last, reduce=not split and (self._reduces_each_microbatch or is_last)
        )
        yield

    def post_backward_weight(self, stage: int, *, is_last: bool) -> None:
        """Reduce the gradients that a split backward pass of a stage has now completed.

        Stock pipeline schedules over FSDP2 reduce once a step and leave out the weights computed after it; this calls
        what FSDP2 itself calls at the end of a backward pass, as torch's own pipeline runtime does.
        """
        module = self._modules[stage]
        root = fully_shard.state(module)  # type: ignore[attr-defined]
        groups = [group for state in root._state_ctx.all_states for group in _get_param_groups(state)]
        # First only add them to what waits in the type of the reduction, where norms already are.
        self._configure(module, is_last=is_last, reduce=False)
        for group in groups:
            group.post_backward()
        if not self._reduces_each_microbatch and not is_last:
            return
        self._configure(module, is_last=is_last, reduce=True)
        # Replicas add theirs up each time: FSDP2 keeps partial sums only where every pass reaches the same parameters,
        # and here norms, whose gradients do not wait, can be a pass ahead of the products.
        module.set_requires_all_reduce(True)
        for group in groups:
            group.post_backward()
        root._root_post_backward_final_callback()

    def finish_grad_sync(self) -> None:
        """Everything was reduced behind the backward passes."""

    def _configure(self, module: FSDPModule, *, is_last: bool, reduce: bool) -> None:
        module.set_requires_gradient_sync(reduce)
        if reduce and self._is_hsdp:
            module.set_requires_all_reduce(is_last)
        module.set_reshard_after_backward(is_last or self._zero_stage == 3)
        module.set_is_last_backward(is_last)


def _fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    ignored: set[nn.Parameter],
    settings: ParallelConfig,
) -> None:
    reshard: bool | int = settings.zero == 3
    if settings.zero == 3 and settings.reshard_over and mesh.size(-1) % settings.reshard_over == 0:
        # Hierarchical partitioning (ZeRO++): backward gathers from neighbours only.
        reshard = settings.reshard_over
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=ignored)


def _apply_quantization(modules: Sequence[nn.Module], quantize: str, traffic: QuantizedTraffic) -> None:
    for part in _iter_fsdp_modules(modules):
        if quantize in ("weights", "both"):
            part.set_custom_all_gather(QuantizedAllGather(traffic))  # type: ignore[arg-type]
        if quantize in ("gradients", "both"):
            part.set_custom_reduce_scatter(QuantizedReduceScatter(traffic))  # type: ignore[arg-type]


def _iter_fsdp_modules(modules: Iterable[nn.Module]) -> Iterator[FSDPModule]:
    return (part for module in modules for part in module.modules() if isinstance(part, FSDPModule))


def _shard_module(
    module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, shard: Callable[..., Any]
) -> FSDPModule:
    tiles = [tile for part in module.modules() if isinstance(part, TiledLinear) for tile in part]
    for part in (*tiles, *blocks, module):
        shard(part, mesh=mesh)
    for tile in tiles:
        _FreeTileHook(tile)
    for unit in _iter_fsdp_modules([module]):
        # Sum, not average: the loop divides by the tokens of the global batch. Without the second call gloo
        # is asked for a pre-multiplied sum, which it does not have.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    if not isinstance(module, FSDPModule):
        raise TypeError("fully_shard did not wrap the module")
    return module


class _FreeTileHook:
    """Has a tile freed after a recomputed forward pass.

    FSDP2 keeps what such a pass gathers for the backward pass that follows: all tiles of a block at once.
    """

    def __init__(self, tile: nn.Module):
        self._in_backward = False
        tile.register_forward_pre_hook(self._pre_forward, prepend=True)  # before FSDP2 gathers
        tile.register_forward_hook(self._post_forward)

    def _pre_forward(self, tile: nn.Module, inputs: Any) -> None:
        self._in_backward = not isinstance(tile.weight, DTensor)  # its own, which has begun and needs the weight

    def _post_forward(self, tile: nn.Module, inputs: Any, output: Any) -> None:
        if not self._in_backward and isinstance(tile, FSDPModule):
            tile.reshard()


def _get_param_groups(state: Any) -> list[Any]:
    """FSDP2's parameter groups of a module: one in torch 2.11, a list of them in 2.13."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]
