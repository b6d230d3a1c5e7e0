"""ZeRO-1, 2, 3 and HSDP with FSDP2: state is sharded by rows over dp_shard and replicated over dp_replicate.

All ZeRO stages shard parameters, gradients and optimizer state between steps. They differ within a step:

| stage | weights all-gathered | gradients reduce-scattered |
| --- | --- | --- |
| 1 | once per step, kept until the last backward pass | once per step, after the last microbatch |
| 2 | once per step, kept until the last backward pass | after each microbatch |
| 3 | for each forward and backward pass | after each microbatch |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from raytrain_hpc.config.schema import ParallelConfig
from raytrain_hpc.config.training_config import computes_in_bf16
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.moe import Experts
from raytrain_hpc.parallel.block_discovery import exclude_shared
from raytrain_hpc.parallel.computation_trace import ComputationTracer, ContributionTrace
from raytrain_hpc.parallel.deterministic_reduce import DeterministicReduceScatter, MicrobatchCursor
from raytrain_hpc.parallel.float8_all_gather import apply_float8_all_gather
from raytrain_hpc.parallel.quantized_collectives import QuantizedAllGather, QuantizedReduceScatter, QuantizedTraffic
from raytrain_hpc.parallel.reduction_order import ReductionOrders
from raytrain_hpc.parallel.source_gradients import SourceGradients
from raytrain_hpc.parallel.tiled_linear import TiledLinear
from raytrain_hpc.parallel.unused_parameters import UnusedParameters
from raytrain_hpc.torch_private_fsdp import (
    FSDPGrads,
    add_fsdp_grads,
    end_fsdp_backward,
    list_fsdp_shards,
    reshard_over_inner_dimension,
    run_fsdp_post_backward,
    take_fsdp_grads,
)


class FSDPSync:
    """Gradient synchronization by FSDP2 of the modules of a rank.

    Constructing it shards the modules in place. Their parameters become DTensors, which stay the same objects.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        blocks: Mapping[int, Sequence[nn.Module]],
        mesh: DeviceMesh,
        settings: ParallelConfig,
        dtype: str,
        experts: Mapping[str, nn.Parameter],
        *,
        expert_mesh: DeviceMesh | None,
        reshard_mesh: DeviceMesh | None,
        reduction_orders: ReductionOrders | None,
        source_gradients: SourceGradients | None,
        tracer: ComputationTracer,
    ):
        """`modules`, `blocks`: by pipeline stage. `mesh`: axis dp_shard, and axis copies if state is replicated.

        `experts`: parameters that are not sharded over `mesh` but over `expert_mesh`, or not at all if that is None.
        `reshard_mesh`: from `build_reshard_mesh`.
        `reduction_orders`: of gradient additions, None: unspecified. `source_gradients`: has the gradients of experts.
        `tracer`: traces gradients whose order is fixed.
        """
        self._zero_stage, self._cursor = settings.zero, MicrobatchCursor()
        self._is_elastic = reduction_orders is not None
        self._reduces_each_microbatch = settings.zero > 1 or self._is_elastic
        replica_group, expert_replica_group = _get_replica_group(mesh), _get_replica_group(expert_mesh)
        self._shard_group = mesh["dp_shard"].get_group()
        if self._is_elastic:  # DeterministicReduceScatter also sums over the replicas
            mesh, expert_mesh = mesh["dp_shard"], None if expert_mesh is None else expert_mesh["dp_shard"]
        self._is_hsdp = mesh.ndim == 2
        self._split_grads: dict[tuple[int, int], FSDPGrads] = {}  # of split passes, by stage and microbatch
        ignored = set(experts.values()) if expert_mesh is None else set()
        policy = MixedPrecisionPolicy()
        if computes_in_bf16(dtype):
            # A decoder's residual stream is in bf16 already, and its rotary tables must stay in fp32.
            casts_inputs = not all(isinstance(module, Decoder) for module in modules.values())
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=casts_inputs
            )
        shard_fn = partial(
            fully_shard, reshard_after_forward=settings.zero == 3, mp_policy=policy, ignored_params=ignored
        )
        for module in modules.values():
            for submodule in module.modules():
                if isinstance(submodule, Experts) and expert_mesh is not None:
                    shard_fn(submodule, mesh=expert_mesh)
        with reshard_over_inner_dimension(reshard_mesh):
            self._modules = {
                stage: _shard_module(module, blocks[stage], mesh, shard_fn) for stage, module in modules.items()
            }
        self._fsdp_modules = [*_iter_fsdp_modules(self._modules.values())]
        self._unused = self._watch_unused_parameters(replica_group)
        self.quantized_traffic = QuantizedTraffic()
        _apply_quantization([*modules.values()], settings.quantize, self.quantized_traffic)
        if dtype == "float8" and settings.quantize not in ("weights", "both"):
            for fsdp_module in self._fsdp_modules:
                apply_float8_all_gather(fsdp_module, mesh.size(-1), self.quantized_traffic)
        if reduction_orders is not None:
            replica_groups = replica_group, expert_replica_group
            self._fix_reduction_order(reduction_orders, source_gradients, *replica_groups, tracer)

    def _fix_reduction_order(
        self,
        reduction_orders: ReductionOrders,
        source_gradients: SourceGradients | None,
        replica_group: dist.ProcessGroup | None,
        expert_replica_group: dist.ProcessGroup | None,
        tracer: ComputationTracer,
    ) -> None:
        make = partial(DeterministicReduceScatter, self._cursor, once_per_step=self._zero_stage == 1)
        expert_order, expert_modules = reduction_orders.experts, _name_sharded_experts(self._modules.values())
        labels = {id(m): f"gradients of {name or 'the rest of the model'}" for name, m in self._iter_named_modules()}
        parameter_names = self._name_parameters()
        for fsdp_module in self._fsdp_modules:
            expert_names, label = expert_modules.get(id(fsdp_module)), labels[id(fsdp_module)]
            parameters = [getattr(owner, name) for owner, name, _ in list_fsdp_shards(fsdp_module)]
            parameters = [parameter for parameter in parameters if parameter.requires_grad]
            names, shapes = tuple(parameter_names[p] for p in parameters), [p.shape for p in parameters]
            if expert_order is not None and source_gradients is not None and expert_names is not None:
                take = partial(source_gradients.take, expert_names)
                trace = ContributionTrace(tracer, label, names, of_experts=True)
                reduce_scatter = make(expert_order, expert_replica_group, take, trace=trace, shapes=shapes)
            else:
                trace = ContributionTrace(tracer, label, names)
                reduce_scatter = make(reduction_orders.dense, replica_group, trace=trace, shapes=shapes)
            fsdp_module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
            fsdp_module.set_all_reduce_hook(reduce_scatter.all_reduce_hook)

    def _watch_unused_parameters(self, replica_group: dist.ProcessGroup | None) -> UnusedParameters:
        """Watch the modules of users. A decoder uses all its parameters in every microbatch."""
        watched = [
            fsdp_module
            for module in self._modules.values()
            if not isinstance(module, Decoder)
            for fsdp_module in _iter_fsdp_modules([module])
        ]
        groups = [self._shard_group] if replica_group is None else [self._shard_group, replica_group]
        return UnusedParameters(watched, groups)

    def _name_parameters(self) -> dict[nn.Parameter, str]:
        modules: Iterable[Any] = self._modules.values()
        return {parameter: name for module in modules for name, parameter in module.named_parameters()}

    def _iter_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return (named for module in self._modules.values() for named in module.named_modules())  # type: ignore[attr-defined]

    @contextmanager
    def backward_context(self, stage: int, microbatch: int, *, is_last: bool, split: bool = False) -> Iterator[None]:
        """Configure when FSDP2 reduces and reshards in this backward pass of a stage.

        A split backward pass defers weight gradients: nothing is reduced before `post_backward_weight`, and the last
        backward pass of the step is for FSDP2 the one that this completes.
        """
        self._cursor.microbatch, self._cursor.is_last = microbatch, is_last
        module = self._modules[stage]
        self._configure(module, is_last=is_last, reduce=not split and (self._reduces_each_microbatch or is_last))
        if split:
            module.set_is_last_backward(False)
        yield
        if split and self._is_elastic:
            self._split_grads[stage, microbatch] = take_fsdp_grads(module)

    def post_backward_weight(self, stage: int, microbatch: int, *, is_last: bool) -> None:
        """Reduce the gradients that a split backward pass of a stage has completed.

        FSDP2 reduces during a backward pass, before deferred weight gradients are computed. Call its post-backward
        functions again here, as the pipeline runtime of torch does.
        """
        module = self._modules[stage]
        # First accumulate them, unreduced, in the reduce dtype, as FSDP2 did with the gradients of norms.
        self._configure(module, is_last=is_last, reduce=False)
        run_fsdp_post_backward(module)
        if self._is_elastic:
            self._cursor.microbatch, self._cursor.is_last = microbatch, is_last
            add_fsdp_grads(self._split_grads.pop((stage, microbatch)))
        if not self._reduces_each_microbatch and not is_last:
            return
        self._configure(module, is_last=is_last, reduce=True)
        # All-reduce over replicas each time. FSDP2 keeps partial sums only if each pass covers the same parameters, but
        # gradients of norms are not deferred and can be one pass ahead of those of linear layers.
        module.set_requires_all_reduce(True)
        run_fsdp_post_backward(module)
        end_fsdp_backward(module)

    def finish_grad_sync(self) -> None:
        """Drop gradients of parameters that no rank has used. FSDP2 reduces all others during backward passes."""
        self._unused.drop_gradients()

    def free_gathered_weights(self) -> None:
        """Reshard the weights that a forward pass without a backward pass has left gathered (ZeRO-1 and 2)."""
        for fsdp_module in self._fsdp_modules:
            fsdp_module.reshard()

    def _configure(self, module: FSDPModule, *, is_last: bool, reduce: bool) -> None:
        module.set_requires_gradient_sync(reduce)
        if reduce and self._is_hsdp:
            module.set_requires_all_reduce(is_last)
        module.set_reshard_after_backward(is_last or self._zero_stage == 3)
        module.set_is_last_backward(is_last)


def _get_replica_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    return mesh["copies"].get_group() if mesh is not None and mesh.ndim == 2 else None


def _name_sharded_experts(modules: Iterable[Any]) -> dict[int, list[str]]:
    """Return the names of the trainable weights of experts, by the id of their module."""
    return {
        id(submodule): [
            f"{prefix}.{name}" for name, parameter in submodule.named_parameters() if parameter.requires_grad
        ]
        for module in modules
        for prefix, submodule in module.named_modules()
        if isinstance(submodule, Experts)
    }


def build_reshard_mesh(mesh: DeviceMesh, reshard_over: int) -> DeviceMesh | None:
    """Build the mesh over which weights stay sharded between forward and backward pass (ZeRO++ hpZ). Collective.

    `mesh`: of all ranks, its last dimension dp_shard. The last dimension of the result has `reshard_over` neighbours in
    dp_shard, among which the backward pass gathers. None: they stay sharded over dp_shard.
    """
    if reshard_over in (0, mesh.size(-1)):
        return None
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, reshard_over), mesh_dim_names=("outer", "inner"))


def _apply_quantization(modules: Sequence[nn.Module], quantize: str, traffic: QuantizedTraffic) -> None:
    for fsdp_module in _iter_fsdp_modules(modules):
        if quantize in ("weights", "both"):
            shards = list_fsdp_shards(fsdp_module)
            if shards:
                owner, name, _ = shards[0]
                num_ranks = getattr(owner, name).device_mesh.size(-1)
                all_gather = QuantizedAllGather([shape for _, _, shape in shards], num_ranks, traffic)
                fsdp_module.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
        if quantize in ("gradients", "both"):
            fsdp_module.set_custom_reduce_scatter(QuantizedReduceScatter(traffic))  # type: ignore[arg-type]


def _iter_fsdp_modules(modules: Iterable[Any]) -> Iterator[FSDPModule]:
    return (submodule for module in modules for submodule in module.modules() if isinstance(submodule, FSDPModule))


def _shard_module(
    module: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, shard_fn: Callable[..., Any]
) -> FSDPModule:
    tiles = [tile for submodule in module.modules() if isinstance(submodule, TiledLinear) for tile in submodule]
    for submodule in (*tiles, *exclude_shared(blocks, module), module):  # parameters belong to one unit each
        shard_fn(submodule, mesh=mesh)
    for tile in tiles:
        _FreeTileHook(tile)
    for fsdp_module in _iter_fsdp_modules([module]):
        # Sum, do not average: the trainer divides by the tokens of the global batch. Without the second call FSDP2
        # uses a pre-multiplied sum, which gloo does not support.
        fsdp_module.set_gradient_divide_factor(1.0)
        fsdp_module.set_force_sum_reduction_for_comms(True)
    if not isinstance(module, FSDPModule):
        raise TypeError("fully_shard did not wrap the module")
    return module


class _FreeTileHook:
    """Forward hooks that reshard a tile after a recomputed forward pass.

    FSDP2 keeps weights gathered during recomputation for the backward pass that follows, which would be all tiles of a
    block at once. The hooks are not compiled, like those of FSDP2: freeing memory cannot be recomputed.
    """

    def __init__(self, tile: nn.Module):
        self._in_backward = False
        disable: Callable[..., Any] = torch.compiler.disable  # FSDP2 has loaded the compiler already
        tile.register_forward_pre_hook(disable(self._pre_forward), prepend=True)  # before FSDP2 all-gathers
        tile.register_forward_hook(disable(self._post_forward))

    def _pre_forward(self, tile: nn.Module, inputs: Any) -> None:
        self._in_backward = not isinstance(tile.weight, DTensor)  # gathered: the backward pass of this tile needs it

    def _post_forward(self, tile: nn.Module, inputs: Any, output: Any) -> None:
        if not self._in_backward and isinstance(tile, FSDPModule):
            tile.reshard()
