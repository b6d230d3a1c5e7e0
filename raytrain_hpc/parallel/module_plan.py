"""Tensor parallelism of any module by a plan: module path -> style, in the words of transformers' `base_model_tp_plan`.

Linear and embedding layers, and stacked expert weights, are replaced by this rank's slices under the same names, and
the layers reduce or gather their inputs and outputs (column- and row-parallel layers: Shoeybi et al. 2019, arXiv
1909.08053). Slices are plain tensors with shard specs, as those of the built-in decoder, rather than DTensors of
`torch.distributed.tensor.parallel.parallelize_module`: every form of data parallelism, the optimizer, checkpoints and
resharding then treat both alike, and no operation pays for DTensor dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.plan_collectives import (
    all_gather_output,
    all_gather_positions,
    all_reduce_input_gradient,
    all_reduce_output,
    split_input,
    split_positions,
)
from raytrain_hpc.planner.module_plan_styles import ALIASES, BLOCK, IGNORED, OWN_PLAN, check_plan, matches_path
from raytrain_hpc.state.shard_spec import ShardSpec


@dataclass
class PlannedShards:
    """Result of a plan: shard specs of sharded parameters, and parameters whose gradients are partial on each rank."""

    partial_grads: list[str]
    shard_specs: dict[str, ShardSpec] = field(default_factory=dict)


def find_planned_blocks(module: nn.Module, plan: Mapping[str, str]) -> list[nn.Module]:
    """Return the modules that a plan calls blocks. Raises ModelError for a path that matches no module."""
    blocks: dict[str, nn.Module] = {}
    for path in (path for path, style in plan.items() if style == BLOCK):
        matching = {name: submodule for name, submodule in module.named_modules() if matches_path(name, path)}
        if not matching:
            raise ModelError(f"plan[{path!r}]='block': the model has no such module")
        blocks |= matching
    return list(blocks.values())


def apply_module_plan(
    module: nn.Module, plan: Mapping[str, str], axes: Mapping[str, Axis], partial_grads: list[str]
) -> dict[str, ShardSpec]:
    """Shard a module over the "tp" axis, in place, and return the shard specs of sharded parameters by name.

    Does nothing without that axis. Parameters that the plan does not mention are replicated. A weight that two layers
    share stays replicated, with both layers. Names of replicated parameters that get only part of their gradient on
    each rank are appended to `partial_grads`. Raises ModelError for a path that matches nothing, or a layer that its
    style does not fit.
    """
    axis = axes.get("tp")
    if axis is None:
        return {}
    plan = _get_own_plan(module) if OWN_PLAN in plan else plan
    check_plan(plan)
    shards, shared = PlannedShards(partial_grads=partial_grads), _find_shared_parameters(module)
    for path, style in plan.items():
        style = ALIASES.get(style, style)
        names = [name for name, _ in (*module.named_modules(), *module.named_parameters()) if matches_path(name, path)]
        if not names:
            raise ModelError(f"plan[{path!r}]={style!r}: the model has no such module or parameter")
        for name in names if style not in IGNORED else ():
            if not any(parameter in shared for _, parameter in _list_parameters(module, name)):
                _apply_style(module, name, style, axis, shards)
    return shards.shard_specs


def _get_own_plan(module: nn.Module) -> dict[str, str]:
    """Return the plan that a transformers model has itself, without entries for layers that it lacks or changes."""
    own_plan: Mapping[str, str] = getattr(module, "tp_plan", None) or {}
    named = dict([*module.named_modules(), *module.named_parameters()])

    def can_apply(path: str, style: str) -> bool:
        layers = [layer for name, layer in named.items() if matches_path(name, path)]
        is_changed = style.startswith("embedding") and any(type(layer) is not nn.Embedding for layer in layers)
        return bool(layers) and not is_changed

    return {path: style for path, style in own_plan.items() if can_apply(path, style)}


def _find_shared_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that occur under several names, such as a tied embedding table."""
    seen: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (shared if parameter in seen else seen).add(parameter)
    return shared


def _list_parameters(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a path, which is that of a parameter or of a module."""
    for parameter_name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter_name == name or parameter_name.startswith(f"{name}."):
            yield parameter_name, parameter


def _apply_style(module: nn.Module, name: str, style: str, axis: Axis, shards: PlannedShards) -> None:
    parent_name, _, attribute = name.rpartition(".")
    target = getattr(module.get_submodule(parent_name), attribute) if name else module
    if isinstance(target, nn.Parameter):
        _shard_stacked_weight(module.get_submodule(parent_name), attribute, name, style, axis, shards)
        return
    apply = _MODULE_STYLES.get(style)
    if apply is None:
        raise ModelError(f"plan[{name!r}]={style!r}: this style is for a stacked weight, not a module")
    apply(target, name, axis, shards)


def _shard(owner: nn.Module, attribute: str, name: str, dim: int, ranges: list[range], shards: PlannedShards) -> None:
    """Replace a parameter by the concatenation of ranges of one dimension, and record its shard spec."""
    if name in shards.shard_specs:
        raise ModelError(f"plan: two entries shard {name}; leave one out")
    parameter: nn.Parameter = getattr(owner, attribute)
    parts = [parameter.detach().narrow(dim, span.start, len(span)) for span in ranges]
    local = nn.Parameter(torch.cat(parts, dim).clone(), requires_grad=parameter.requires_grad)
    setattr(owner, attribute, local)
    shards.shard_specs[name] = ShardSpec.from_ranges(name, tuple(parameter.shape), dim, ranges)


def _is_too_small(size: int, axis: Axis) -> bool:
    """Return whether a rank would have nothing of a layer that is split unevenly: it then stays whole on all ranks."""
    return size < axis.size


def _get_range(size: int, axis: Axis, name: str) -> range:
    if size % axis.size:
        raise ModelError(f"plan: {name} has {size} channels, which parallel.tp={axis.size} does not divide")
    return axis.get_local_range(size)


def _pack_ranges(size: int, axis: Axis, name: str) -> list[range]:
    """Return the local ranges of the two halves of a packed dimension, such as gate and up projections."""
    half = size // 2
    local = _get_range(half, axis, name)
    return [local, range(half + local.start, half + local.stop)]


def _require(module: nn.Module, kind: type[nn.Module], name: str, style: str) -> Any:
    if not isinstance(module, kind):
        kinds = f"{type(module).__name__}, and the style needs {kind.__name__}"
        raise ModelError(f"plan[{name!r}]={style!r}: it is a {kinds}")
    return module


def _replace_class(module: nn.Module, new_class: type[nn.Module], name: str, style: str) -> None:
    """Give a layer the forward pass of a subclass. Raises ModelError for a layer with a forward pass of its own.

    Unlike a closure as the forward pass, it forms no reference cycle, which would keep process groups alive.
    """
    if type(module) is not new_class.__mro__[1]:
        raise ModelError(f"plan[{name!r}]={style!r}: {type(module).__name__} has a forward pass of its own")
    module.__class__ = new_class


def _shard_linear_rows(linear: nn.Linear, name: str, ranges: list[range], shards: PlannedShards) -> None:
    _shard(linear, "weight", f"{name}.weight", 0, ranges, shards)
    if linear.bias is not None:
        _shard(linear, "bias", f"{name}.bias", 0, ranges, shards)
    linear.out_features = len(linear.weight)


def _reduce_input_gradient(linear: nn.Module, axis: Axis) -> None:
    """Let a layer with some rows of its weight sum the gradient of its input over the axis."""
    linear.register_forward_pre_hook(lambda module, inputs: (all_reduce_input_gradient(inputs[0], axis), *inputs[1:]))


def _apply_colwise(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    linear = _require(module, nn.Linear, name, "colwise")
    _shard_linear_rows(linear, name, [_get_range(linear.out_features, axis, name)], shards)
    _reduce_input_gradient(linear, axis)


def _apply_colwise_gather_output(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    """Shard rows unevenly if necessary, such as those of a head with a vocabulary of any size."""
    linear = _require(module, nn.Linear, name, "colwise_gather_output")
    size = linear.out_features
    if _is_too_small(size, axis):
        return
    _shard_linear_rows(linear, name, [axis.get_local_range(size)], shards)
    _reduce_input_gradient(linear, axis)
    linear.register_forward_hook(lambda module, inputs, output: all_gather_output(output, axis, size))


def _apply_packed_colwise(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    linear = _require(module, nn.Linear, name, "packed_colwise")
    _shard_linear_rows(linear, name, _pack_ranges(linear.out_features, axis, name), shards)
    _reduce_input_gradient(linear, axis)


def _apply_rowwise(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    if isinstance(module, nn.Embedding):
        _apply_embedding_rowwise(module, name, axis, shards)
        return
    linear = _require(module, nn.Linear, name, "rowwise")
    _shard(linear, "weight", f"{name}.weight", 1, [_get_range(linear.in_features, axis, name)], shards)
    _make_row_parallel(linear, name, axis)


def _apply_packed_rowwise(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    linear = _require(module, nn.Linear, name, "packed_rowwise")
    _shard(linear, "weight", f"{name}.weight", 1, _pack_ranges(linear.in_features, axis, name), shards)
    _make_row_parallel(linear, name, axis)


def _apply_rowwise_split_input(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    linear = _require(module, nn.Linear, name, "rowwise_split_input")
    linear.register_forward_pre_hook(lambda module, inputs: (split_input(inputs[0], axis), *inputs[1:]))
    _apply_rowwise(linear, name, axis, shards)


class _RowParallelLinear(nn.Linear):
    """A linear layer that sums its products over the axis before it adds its bias."""

    axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        output = all_reduce_output(F.linear(x, self.weight), self.axis)
        return output if self.bias is None else output + self.bias


def _make_row_parallel(linear: Any, name: str, axis: Axis) -> None:
    _replace_class(linear, _RowParallelLinear, name, "rowwise")
    linear.in_features, linear.axis = linear.weight.shape[1], axis


class _RowParallelEmbedding(nn.Embedding):
    """An embedding with some rows of its table, which sums vectors over the axis."""

    axis: Axis
    rows: range

    def forward(self, tokens: Tensor) -> Tensor:
        is_local = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        local = torch.where(is_local, tokens - self.rows.start, 0)
        vectors = F.embedding(local, self.weight, self.padding_idx)  # the row of padding has no gradient
        return all_reduce_output(vectors * is_local.unsqueeze(-1).to(vectors.dtype), self.axis)


def _apply_embedding_rowwise(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    embedding = _require(module, nn.Embedding, name, "embedding_rowwise")
    if _is_too_small(embedding.num_embeddings, axis):
        return
    rows = axis.get_local_range(embedding.num_embeddings)
    if embedding.max_norm is not None or embedding.scale_grad_by_freq:
        raise ModelError(f"plan[{name!r}]: max_norm and scale_grad_by_freq need the whole table; leave the layer out")
    _replace_class(embedding, _RowParallelEmbedding, name, "embedding_rowwise")
    padding = embedding.padding_idx
    embedding.padding_idx = padding - rows.start if padding is not None and padding in rows else None
    embedding.rows, embedding.axis = rows, axis
    _shard(embedding, "weight", f"{name}.weight", 0, [rows], shards)


def _apply_embedding_colwise(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    embedding = _require(module, nn.Embedding, name, "embedding_colwise")
    size = embedding.embedding_dim
    if _is_too_small(size, axis):
        return
    _shard(embedding, "weight", f"{name}.weight", 1, [axis.get_local_range(size)], shards)
    embedding.register_forward_hook(lambda module, inputs, output: all_gather_output(output, axis, size))


def _apply_sequence(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    """Let a module, such as a norm, compute the local positions of [b, t, ...], and gather its output."""
    lengths: list[int] = []

    def split(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        lengths.append(inputs[0].shape[1])
        return split_positions(inputs[0], axis), *inputs[1:]

    module.register_forward_pre_hook(split)
    module.register_forward_hook(lambda module, inputs, output: all_gather_positions(output, axis, lengths.pop()))
    shards.partial_grads += [f"{name}.{p}" for p, _ in module.named_parameters()]


def _apply_partial_gradient(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    shards.partial_grads += [f"{name}.{p}" for p, _ in module.named_parameters()]


def _apply_experts(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    """Let experts, whose stacked weights are sharded by channel, sum their outputs over the axis."""

    def reduce_gradients(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return (
            tuple(_reduce_if_differentiable(value, axis) for value in inputs),
            {key: _reduce_if_differentiable(value, axis) for key, value in keywords.items()},
        )

    module.register_forward_pre_hook(reduce_gradients, with_kwargs=True)
    module.register_forward_hook(lambda module, inputs, output: all_reduce_output(output, axis))


def _apply_all_reduce(module: nn.Module, name: str, axis: Axis, shards: PlannedShards) -> None:
    module.register_forward_hook(lambda module, inputs, output: all_reduce_output(output, axis))


def _reduce_if_differentiable(value: Any, axis: Axis) -> Any:
    is_differentiable = isinstance(value, Tensor) and value.is_floating_point()
    return all_reduce_input_gradient(value, axis) if is_differentiable else value


def _shard_stacked_weight(
    owner: nn.Module, attribute: str, name: str, style: str, axis: Axis, shards: PlannedShards
) -> None:
    """Shard a parameter [..., rows, columns] that is used by its module directly, such as stacked experts."""
    parameter: nn.Parameter = getattr(owner, attribute)
    dims = {"colwise": parameter.ndim - 2, "packed_colwise": parameter.ndim - 2}
    dims |= {"rowwise": parameter.ndim - 1, "packed_rowwise": parameter.ndim - 1}
    if style not in dims or parameter.ndim < 2:
        raise ModelError(f"plan[{name!r}]={style!r}: a weight used directly can be colwise, rowwise, or packed_...")
    dim = dims[style]
    size = parameter.shape[dim]
    ranges = _pack_ranges(size, axis, name) if style.startswith("packed") else [_get_range(size, axis, name)]
    _shard(owner, attribute, name, dim, ranges, shards)


_MODULE_STYLES: dict[str, Callable[[nn.Module, str, Axis, PlannedShards], None]] = {
    "colwise": _apply_colwise,
    "colwise_gather_output": _apply_colwise_gather_output,
    "packed_colwise": _apply_packed_colwise,
    "rowwise": _apply_rowwise,
    "packed_rowwise": _apply_packed_rowwise,
    "rowwise_split_input": _apply_rowwise_split_input,
    "embedding_rowwise": _apply_embedding_rowwise,
    "embedding_colwise": _apply_embedding_colwise,
    "sequence": _apply_sequence,
    "replicated_with_grad_allreduce": _apply_partial_gradient,
    "moe_tp_experts": _apply_experts,
    "all_reduce": _apply_all_reduce,
}
