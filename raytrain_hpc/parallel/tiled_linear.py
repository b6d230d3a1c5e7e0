"""Tiled linear layers: weights are split into tiles of output rows, so that ZeRO-3 gathers one tile at a time.

Memory-centric tiling (Rajbhandari et al. 2021, arXiv 2104.07857), for layers too large to be gathered at once. Each
tile is a linear layer, which `parallel.fsdp` gathers, uses and frees separately in the forward and the backward pass.
Tiles have shard specs like other parameters, so checkpoints do not depend on tiling.

At most one tile is gathered at a time. Including the buffers of FSDP2, peak memory is twice the largest tile, and three
times while a block recomputes, since the first tile of its backward pass is already gathered.

Not tiled: embeddings and tied heads, which use their table; experts; replicated key-value projections, which are small.
A tile has at least one row per rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from raytrain_hpc.model.decoder import Decoder, Head
from raytrain_hpc.parallel.tensor_parallel import ReplicatedKVLinear, RowParallelLinear
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.shard_spec import ShardSpec


class TiledLinear(nn.ModuleList):
    """Linear layers with the same input that each compute a range of the outputs, run one after another."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., out_features] of x [..., in_features]."""
        rows = x.flatten(0, -2)  # otherwise a product with bias returns a view, about which FSDP2 warns
        return torch.cat([tile(rows).unflatten(0, x.shape[:-1]) for tile in self], dim=-1)


def apply_tiling(
    decoder: Decoder, max_elements: int, num_ranks: int, shard_specs: Mapping[str, ShardSpec]
) -> dict[str, ShardSpec]:
    """Split each weight of more than `max_elements` elements into tiles of at most as many; 0 does nothing.

    `num_ranks`: ranks that shard the rows of a tile. Returns `shard_specs`, those of tiled weights replaced by those of
    their tiles. Call after `apply_tensor_parallel` and before activation checkpointing and FSDP2 are applied.
    """
    shard_specs = dict(shard_specs)
    if not max_elements:
        return shard_specs
    split_rows = partial(_split_rows, max_elements=max_elements, num_ranks=num_ranks)
    # ReplicatedKVLinear uses the weight of `kv` directly.
    skipped = {module.kv for module in decoder.modules() if isinstance(module, ReplicatedKVLinear)}
    for name, module in list(decoder.named_modules()):
        if _has_adapters(module) and type(module) is nn.Linear and (row_ranges := split_rows(module.weight)):
            weight = _replace_weight_with_tiles(module, row_ranges)
            module.forward = partial(_linear_forward, module)  # type: ignore[method-assign]
            _update_shard_specs(name, f"{name}.tiles", {"weight": weight}, row_ranges, shard_specs)
        elif type(module) is nn.Linear and module not in skipped and (row_ranges := split_rows(module.weight)):
            parent, _, attribute = name.rpartition(".")
            setattr(decoder.get_submodule(parent), attribute, _make_tiles(module.weight, module.bias, row_ranges))
            _update_shard_specs(name, name, {"weight": module.weight, "bias": module.bias}, row_ranges, shard_specs)
        elif isinstance(module, RowParallelLinear) and (row_ranges := split_rows(module.weight)):
            weight = _replace_weight_with_tiles(module, row_ranges)
            module.forward = partial(_row_parallel_forward, module)  # type: ignore[method-assign]
            _update_shard_specs(name, f"{name}.tiles", {"weight": weight}, row_ranges, shard_specs)
        # A tied head of a later stage is a copy of the table of the first stage, and must keep its shape.
        elif isinstance(module, Head) and not decoder.spec.tie_embeddings and (row_ranges := split_rows(module.weight)):
            weight = _replace_weight_with_tiles(module, row_ranges)
            module.forward = partial(_head_forward, module)  # type: ignore[method-assign]
            _update_shard_specs(name, f"{name}.tiles", {"weight": weight}, row_ranges, shard_specs)
    return shard_specs


def _split_rows(weight: Tensor | None, max_elements: int, num_ranks: int) -> list[range]:
    """Return the row ranges of the tiles, with lengths that differ by at most one; [] if no tiling is needed."""
    if weight is None or weight.numel() <= max_elements:
        return []
    num_rows, width = weight.shape
    # Gathered shards have equal sizes, so a gathered tile includes up to num_ranks - 1 rows of padding.
    max_rows = max(num_ranks, max_elements // width // num_ranks * num_ranks)
    num_tiles = -(-num_rows // max_rows)
    if num_tiles == 1:
        return []
    return [range(tile * num_rows // num_tiles, (tile + 1) * num_rows // num_tiles) for tile in range(num_tiles)]


def _make_tiles(weight: Tensor, bias: Tensor | None, row_ranges: list[range]) -> TiledLinear:
    make_linear = partial(nn.Linear, weight.shape[1], bias=bias is not None, device=weight.device, dtype=weight.dtype)
    tiles = TiledLinear(make_linear(len(rows)) for rows in row_ranges)
    return tiles.requires_grad_(weight.requires_grad)  # LoRA has frozen all but its adapters


def _has_adapters(module: nn.Module) -> bool:
    return hasattr(module, "lora_A")


def _replace_weight_with_tiles(module: RowParallelLinear | Head | nn.Linear, row_ranges: list[range]) -> Tensor:
    """Replace the weight of a module by tiles and return it. The module stays, since it has hooks."""
    weight = module.weight
    if weight is None:
        raise ValueError("the module has no weight to tile")
    module.register_parameter("weight", None)
    if not isinstance(module, nn.Linear):
        del module.product  # the tiles compute the product, perhaps with deferred weight gradients
    module.tiles = _make_tiles(weight, None, row_ranges)
    return weight


def _row_parallel_forward(linear: RowParallelLinear, x: Tensor) -> Tensor:
    output: Tensor = linear.reduce_output(x, linear.tiles(x))  # type: ignore[operator]
    return output


def _linear_forward(linear: nn.Linear, x: Tensor) -> Tensor:
    product: Tensor = linear.tiles(x)  # type: ignore[operator]
    return product if linear.bias is None else product + linear.bias


def _head_forward(head: Head, x: Tensor, table: Tensor | None, targets: Tensor | None = None) -> Tensor:
    logits: Tensor = head.tiles(x)  # type: ignore[operator]
    return logits


def _update_shard_specs(
    name: str,
    tiles: str,
    parameters: dict[str, Tensor | None],
    row_ranges: list[range],
    shard_specs: dict[str, ShardSpec],
) -> None:
    """Replace the shard specs of the parameters of `name` by those of the tiles under the name `tiles`."""
    for kind, tensor in parameters.items():
        if tensor is None:
            continue
        full_spec = shard_specs.pop(f"{name}.{kind}", None) or ShardSpec.from_shape(f"{name}.{kind}", tensor.shape)
        for tile, rows in enumerate(row_ranges):
            box = Box((rows.start, *(0 for _ in tensor.shape[1:])), (len(rows), *tensor.shape[1:]))
            shard_specs[f"{tiles}.{tile}.{kind}"] = ShardSpec(
                full_spec.name, full_spec.shape, full_spec.restrict_mappings(box)
            )
