"""LoRA on the layers of a decoder, in whatever way they are sharded.

The adapters of a layer with some rows of W are a whole A and the same rows of B; those of a layer with some columns of
W the same columns of A and a whole B. A whole matrix gets part of its gradient on each tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.lora import ADAPTER, LORA_MARKER, AddAdapter, LoraSpec, add_lora_layers
from raytrain_hpc.parallel.tensor_parallel import ReplicatedKVLinear, RowParallelLinear
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.shard_spec import ShardSpec, SliceMapping

_Layer = nn.Linear | RowParallelLinear | ReplicatedKVLinear


def apply_lora(decoder: Decoder, lora: LoraSpec | None, shard_specs: Mapping[str, ShardSpec]) -> dict[str, ShardSpec]:
    """Add uninitialized adapters to the linear layers of a decoder on the meta device, and freeze all other parameters.

    `lora`: None does nothing. `shard_specs`: of the decoder so far. Call after `apply_tensor_parallel`, which replaces
    layers, and before `apply_tiling`. Returns the shard specs of the sharded adapters. Raises ModelError if the decoder
    has none of the target layers.
    """
    if lora is None:
        return {}
    layers = {name: layer for name, layer in decoder.named_modules() if _is_target(name, layer, lora.target_modules)}
    if not layers:
        raise ModelError(f"lora.target_modules={list(lora.target_modules)}: the decoder has none of these layers")
    adapter_specs: dict[str, ShardSpec] = {}
    dtype = next(decoder.parameters()).dtype
    for name, layer in layers.items():
        with torch.device("meta"):
            adapter_specs |= _add_adapters(name, layer, lora, shard_specs)
        for adapters in (layer.lora_A, layer.lora_B):
            adapters.to(dtype)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(LORA_MARKER in name)
    return adapter_specs


def _is_target(name: str, module: nn.Module, target_modules: Collection[str]) -> bool:
    return isinstance(module, _Layer) and name.rpartition(".")[2] in target_modules


def _add_adapters(
    name: str, layer: nn.Module, lora: LoraSpec, shard_specs: Mapping[str, ShardSpec]
) -> dict[str, ShardSpec]:
    if isinstance(layer, ReplicatedKVLinear):
        sizes = {"q": layer.q.out_features, "kv": layer.kv.out_features}
        add_lora_layers(layer, layer.q.in_features, sizes, lora.rank)
        layer.register_forward_hook(_AddReplicatedKVAdapter(lora.scale))
        return {
            f"{name}.lora_B.{part}.weight": _make_spec(name, "B", shard_specs[f"{name}.{part}.weight"], lora.rank)
            for part in sizes
        }
    weight = layer.get_parameter("weight")
    rows, columns = weight.shape
    add_lora_layers(layer, columns, {ADAPTER: rows}, lora.rank)
    add_adapter = AddAdapter(lora.scale)
    if isinstance(layer, RowParallelLinear):
        layer.product_hook = add_adapter  # before the sum over ranks
    else:
        layer.register_forward_hook(add_adapter)
    spec = shard_specs.get(f"{name}.weight")
    if spec is None:
        return {}
    if columns < spec.shape[1]:
        return {f"{name}.lora_A.{ADAPTER}.weight": _make_spec(name, "A", spec, lora.rank)}
    return {f"{name}.lora_B.{ADAPTER}.weight": _make_spec(name, "B", spec, lora.rank)}


def _make_spec(name: str, matrix: Literal["A", "B"], weight: ShardSpec, rank: int) -> ShardSpec:
    """Return the spec of A [rank, columns] or B [rows, rank] for a layer with some columns or rows of its weight."""
    dim = "AB".index(matrix)  # of size `rank`; the other one is sharded as that of the weight

    def replace_dim(box: Box) -> Box:
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = 0, rank
        return Box(tuple(offsets), tuple(sizes))

    mappings = [SliceMapping(replace_dim(m.global_box), replace_dim(m.local_box)) for m in weight.mappings]
    shape = (rank, weight.shape[1]) if matrix == "A" else (weight.shape[0], rank)
    return ShardSpec(f"{name}.lora_{matrix}.{ADAPTER}.weight", shape, tuple(mappings))


@dataclass(frozen=True)
class _AddReplicatedKVAdapter:
    """`AddAdapter` of a layer that computes queries, and the keys and values that local query heads use."""

    scale: float

    def __call__(self, layer: ReplicatedKVLinear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return W x + scale B A x of the layer's output W x."""
        hidden = layer.get_submodule(f"lora_A.{ADAPTER}")(inputs[0])
        queries, weight = layer.get_submodule("lora_B.q"), layer.get_parameter("lora_B.kv.weight")
        adapted = torch.cat((queries(hidden), layer.project_kv(hidden, weight, None)), dim=-1)
        return output + adapted * self.scale
