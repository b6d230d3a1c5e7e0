"""Matrices cut into tiles of output rows, so that ZeRO-3 gathers a part of a layer at a time.

For a layer larger than a device can gather: memory-centric tiling (Rajbhandari et al. 2021, arXiv 2104.07857). Every
tile is a linear layer of its own, and `parallel.shard` makes it a unit that is gathered, used and freed in its turn,
forward and backward. What a rank holds of the whole matrix is a cut like any other, so the state does not change.

At any time one tile's weight is in place. With FSDP2's buffers, for the gather before it or behind it, that is twice
the largest tile, and three times while a block recomputes, since the tile that its backward pass begins with waits.

Left whole are what is no matrix of a product with this shape: embeddings, and so a tied head, which uses their table;
experts; keys and values that all tensor-parallel ranks hold, which are small. The smallest tile has a row a rank.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from raytrain_hpc.model.decoder import Decoder, Head
from raytrain_hpc.parallel.tensor_parallel import ReplicatedKVLinear, RowParallelLinear
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.shard_spec import ShardSpec


class TiledLinear(nn.ModuleList):
    """Linear layers that share their input and make a run of the outputs each, used one after another."""

    def forward(self, x: Tensor) -> Tensor:
        """All outputs of x [..., inputs], as of one layer."""
        rows = x.flatten(0, -2)  # with more dimensions a product with a bias is a view, of which FSDP2 warns
        return torch.cat([tile(rows).unflatten(0, x.shape[:-1]) for tile in self], dim=-1)


def apply_tiling(decoder: Decoder, max_elements: int, num_ranks: int, shard_specs: dict[str, ShardSpec]) -> None:
    """Replace each matrix of more than `limit` elements by tiles of at most as many; `cuts` then says what they are.

    `ranks` share out the rows of each tile. For a decoder that tensor parallelism has cut, before anything is wrapped
    around parts of it.
    """
    rows_of = partial(_split_rows, max_elements=max_elements, num_ranks=num_ranks)
    skipped = {
        part.kv for part in decoder.modules() if isinstance(part, ReplicatedKVLinear)
    }  # its weight is used by itself
    for name, part in list(decoder.named_modules()):
        if type(part) is nn.Linear and part not in skipped and (spans := rows_of(part.weight)):
            parent, _, last = name.rpartition(".")
            setattr(decoder.get_submodule(parent), last, _make_tiles(part.weight, part.bias, spans))
            _update_shard_specs(name, name, {"weight": part.weight, "bias": part.bias}, spans, shard_specs)
        elif isinstance(part, RowParallelLinear) and (spans := rows_of(part.weight)):
            weight = _replace_weight_with_tiles(part, spans)
            part.forward = partial(_row_parallel_forward, part)  # type: ignore[method-assign]
            _update_shard_specs(name, f"{name}.tiles", {"weight": weight}, spans, shard_specs)
        # A tied head of a later stage has a matrix too: a copy, paired as a whole with the table of the first stage.
        elif isinstance(part, Head) and not decoder.spec.tie_embeddings and (spans := rows_of(part.weight)):
            weight = _replace_weight_with_tiles(part, spans)
            part.forward = partial(_head_forward, part)  # type: ignore[method-assign]
            _update_shard_specs(name, f"{name}.tiles", {"weight": weight}, spans, shard_specs)


def _split_rows(weight: Tensor | None, max_elements: int, num_ranks: int) -> list[range]:
    """The rows of each tile, runs at most one apart; none where the matrix is within the limit."""
    if weight is None or weight.numel() <= max_elements:
        return []
    rows, width = weight.shape
    # Ranks gather shares of one size, so a tile is gathered with up to ranks - 1 rows of nothing.
    most = max(num_ranks, max_elements // width // num_ranks * num_ranks)
    count = -(-rows // most)
    if count == 1:
        return []
    return [range(number * rows // count, (number + 1) * rows // count) for number in range(count)]


def _make_tiles(weight: Tensor, bias: Tensor | None, spans: list[range]) -> TiledLinear:
    linear = partial(nn.Linear, weight.shape[1], bias=bias is not None, device=weight.device, dtype=weight.dtype)
    return TiledLinear(linear(len(span)) for span in spans)


def _replace_weight_with_tiles(part: RowParallelLinear | Head, spans: list[range]) -> Tensor:
    """Give a module tiles instead of its matrix, which is returned. The module stays: others have hooks on it."""
    weight = part.weight
    if weight is None:
        raise ValueError("there is no matrix to tile")
    part.register_parameter("weight", None)
    del part.product  # the tiles have products of their own, which may be deferred
    part.tiles = _make_tiles(weight, None, spans)
    return weight


def _row_parallel_forward(row: RowParallelLinear, x: Tensor) -> Tensor:
    summed: Tensor = row.reduce_output(row.tiles(x))  # type: ignore[operator]
    return summed


def _head_forward(head: Head, x: Tensor, table: Tensor | None) -> Tensor:
    logits: Tensor = head.tiles(x)  # type: ignore[operator]
    return logits


def _update_shard_specs(
    name: str, tiles: str, parameters: dict[str, Tensor | None], spans: list[range], shard_specs: dict[str, ShardSpec]
) -> None:
    """Say what the tiles under the name `tiles` are of what the parameters of `name` were."""
    for kind, tensor in parameters.items():
        if tensor is None:
            continue
        before = shard_specs.pop(f"{name}.{kind}", None) or ShardSpec.from_shape(f"{name}.{kind}", tensor.shape)
        for number, span in enumerate(spans):
            box = Box((span.start, *(0 for _ in tensor.shape[1:])), (len(span), *tensor.shape[1:]))
            shard_specs[f"{tiles}.{number}.{kind}"] = ShardSpec(before.name, before.shape, before.restrict(box))
