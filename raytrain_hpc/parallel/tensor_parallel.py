"""Tensor parallelism with sequence parallelism.

Ranks of an axis shard attention heads, feed-forward channels and vocabulary rows (column- and row-parallel linear
layers: Shoeybi et al. 2019, arXiv 1909.08053). Between these layers they shard the positions of the residual stream
(Korthikanti et al. 2022, arXiv 2205.05198): positions are all-gathered before a column-parallel layer and
reduce-scattered after a row-parallel one. Sizes need not divide evenly: ranges differ in length by at most one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.model.decoder import Attention, Decoder
from raytrain_hpc.model.moe import MixtureOfExperts
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.vocab_parallel import VocabParallelEmbedding
from raytrain_hpc.state.shard_spec import ShardSpec

_SEQ_DIM = 1  # the dimension of positions in [b, t, ...]


def apply_tensor_parallel(decoder: Decoder, axes: Mapping[str, Axis], seq_len: int) -> dict[str, ShardSpec]:
    """Shard a decoder on the meta device over the "tp" axis, in place. Does nothing without that axis.

    `seq_len`: positions per sample that the ranks of the axis share, after context parallelism. Call after
    `apply_expert_parallel`, which shards the experts. Returns the shard specs of the sharded parameters by local name.
    """
    axis = axes.get("tp")
    if axis is None:
        return {}
    with torch.device("meta"):
        return _shard_decoder(decoder, axis, seq_len)


def _shard_decoder(decoder: Decoder, axis: Axis, seq_len: int) -> dict[str, ShardSpec]:
    spec, dtype = decoder.spec, next(decoder.parameters()).dtype
    gather_input = partial(_all_gather_input, axis, seq_len)
    rows = [axis.get_local_range(spec.vocab_size)]
    table_shape = (spec.vocab_size, spec.hidden_size)
    shard_specs: dict[str, ShardSpec] = {}
    if decoder.embedding is not None:
        decoder.embedding = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, axis)  # type: ignore[assignment]
        shard_specs["embedding.weight"] = ShardSpec.from_ranges("embedding.weight", table_shape, 0, rows)
    if decoder.positions is not None:
        decoder.positions = _LocalPositionEmbedding(decoder.positions, axis)  # type: ignore[assignment]
    for layer, block in decoder.blocks().items():
        prefix = f"layers.{layer}."
        shard_specs |= dict(_shard_attention(block.attention, prefix + "attention.", axis))
        if isinstance(block.mlp, MixtureOfExperts):
            shard_specs |= dict(_shard_moe(block.mlp, prefix + "mlp.", axis))
        else:
            shard_specs |= dict(_shard_feed_forward(block.mlp, prefix + "mlp.", axis))
        block.attention.register_forward_pre_hook(gather_input)
        block.mlp.register_forward_pre_hook(gather_input)
    if decoder.head is not None:
        decoder.head.register_forward_pre_hook(gather_input)
        if decoder.head.weight is not None:
            decoder.head.weight = nn.Parameter(torch.empty(len(rows[0]), spec.hidden_size))
            shard_specs["head.weight"] = ShardSpec.from_ranges(_get_head_weight_name(spec), table_shape, 0, rows)
    decoder.to(dtype)
    return shard_specs


def list_partial_grads(decoder: Decoder, axes: Mapping[str, Axis], shard_specs: Mapping[str, ShardSpec]) -> list[str]:
    """Return the parameters that are replicated over the "tp" axis but get only part of their gradient on each rank.

    Norms, position embeddings and biases of row-parallel layers see the local positions; replicated key-value
    projections see the local heads. Call after `apply_tensor_parallel`. `shard_specs`: all sharded parameters so far.
    """
    if "tp" not in axes:
        return []
    replicated = (".qkv.kv.", ".qkv.lora_B.kv.")  # whole in each rank, as part of a projection that is sharded
    return [
        name
        for name, parameter in decoder.named_parameters()
        if parameter.requires_grad and (name not in shard_specs or any(part in name for part in replicated))
    ]


def name_head_weight(decoder: Decoder) -> dict[str, ShardSpec]:
    """Return the shard spec of an unsharded head: its own weight, or a copy of the embedding table if it is tied."""
    if decoder.head is None or decoder.head.weight is None:
        return {}
    return {"head.weight": ShardSpec.from_shape(_get_head_weight_name(decoder.spec), decoder.head.weight.shape)}


def _all_gather_input(axis: Axis, seq_len: int, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return axis.all_gather(inputs[0], _SEQ_DIM, seq_len), *inputs[1:]


class _LocalPositionEmbedding(nn.Module):
    """A learned position embedding that returns the local range of the positions."""

    def __init__(self, table: nn.Embedding, axis: Axis):
        super().__init__()
        self._axis, self.weight = axis, table.weight

    def forward(self, positions: Tensor) -> Tensor:
        local_range = self._axis.get_local_range(positions.shape[-1])
        return F.embedding(positions[..., local_range.start : local_range.stop], self.weight)


class RowParallelLinear(nn.Module):
    """A row-parallel linear layer: input features are sharded, and outputs are reduce-scattered over positions."""

    def __init__(self, in_features: int, out_features: int, bias: bool, axis: Axis):
        super().__init__()
        self._axis = axis
        self.product: Callable[[Tensor, Tensor], Tensor] = F.linear
        # Like a forward hook, for the product before it is reduced: adds the output of LoRA adapters.
        self.product_hook: Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor] | None = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, local t, out_features] of x [b, t, local in_features]."""
        return self.reduce_output(x, self.product(x, self.weight))

    def reduce_output(self, x: Tensor, product: Tensor) -> Tensor:
        """Reduce-scatter partial products [b, t, out_features] of x over positions and add the bias."""
        if self.product_hook is not None:
            product = self.product_hook(self, (x,), product)
        output = self._axis.reduce_scatter(product, _SEQ_DIM)
        return output if self.bias is None else output + self.bias


class ReplicatedKVLinear(nn.Module):
    """A QKV projection with sharded query heads and replicated key-value weights.

    Used if the axis size does not divide the number of key-value heads. Only the key-value heads that local query heads
    use are computed. The weights are small, and the gradient of replicated ones is simply the sum over ranks.
    """

    def __init__(self, attention: Attention, local_heads: range, bias: bool):
        super().__init__()
        width, head_dim = attention.qkv.in_features, attention.head_dim
        self._num_kv_heads, self._head_dim = attention.num_kv_heads, head_dim
        group_size = attention.num_heads // attention.num_kv_heads
        kv_heads = [head // group_size for head in local_heads]  # key-value head of each local query head
        self._kv_head_indices = sorted(set(kv_heads))
        group_sizes = [kv_heads.count(head) for head in self._kv_head_indices]
        self.is_grouped = len(set(group_sizes)) == 1
        # If key-value heads serve different numbers of local query heads, repeat them to one per query head.
        self._kv_index = None if self.is_grouped else [self._kv_head_indices.index(head) for head in kv_heads]
        self.num_kv_heads = len(self._kv_head_indices) if self.is_grouped else len(kv_heads)
        self.q = nn.Linear(width, len(local_heads) * head_dim, bias=bias)
        self.kv = nn.Linear(width, 2 * attention.num_kv_heads * head_dim, bias=bias)
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear  # of keys and values

    @property
    def num_kv_rows(self) -> int:
        """Number of rows of `kv` that are used."""
        return 2 * len(self._kv_head_indices) * self._head_dim

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, t, (heads + 2 kv_heads) * head_dim] of x [b, t, hidden_size], in the order of `Attention.qkv`."""
        return torch.cat((self.q(x), self.project_kv(x, self.kv.weight, self.kv.bias, self.product)), dim=-1)

    def project_kv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
    ) -> Tensor:
        """Return the keys and values that local query heads use. `weight`, `bias`: rows of all keys and values."""
        kv_shape = (2, self._num_kv_heads, self._head_dim)
        weight = weight.view(*kv_shape, -1)[:, self._kv_head_indices].flatten(0, 2)
        bias = None if bias is None else bias.view(kv_shape)[:, self._kv_head_indices].flatten()
        kv = product(x, weight, bias)
        if self._kv_index is None:
            return kv
        return kv.view(*kv.shape[:-1], 2, len(self._kv_head_indices), self._head_dim)[..., self._kv_index, :].flatten(
            -3
        )


def _shard_attention(attention: Attention, prefix: str, axis: Axis) -> Iterator[tuple[str, ShardSpec]]:
    num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    width, has_bias = attention.qkv.in_features, attention.qkv.bias is not None
    local_heads = axis.get_local_range(num_heads)
    query_rows, num_query_rows = _scale_range(local_heads, head_dim), num_heads * head_dim
    num_rows = num_query_rows + 2 * num_kv_heads * head_dim
    if num_kv_heads % axis.size == 0:
        kv_rows = _scale_range(axis.get_local_range(num_kv_heads), head_dim)
        row_ranges = [
            query_rows,
            _shift_range(kv_rows, num_query_rows),
            _shift_range(kv_rows, num_query_rows + num_kv_heads * head_dim),
        ]
        attention.qkv = nn.Linear(width, sum(map(len, row_ranges)), bias=has_bias)
        attention.num_kv_heads = num_kv_heads // axis.size
        yield from _make_linear_specs(f"{prefix}qkv", f"{prefix}qkv", (num_rows, width), row_ranges, has_bias)
    else:
        projection = ReplicatedKVLinear(attention, local_heads, has_bias)
        attention.qkv = projection  # type: ignore[assignment]
        attention.num_kv_heads = projection.num_kv_heads
        yield from _make_linear_specs(f"{prefix}qkv.q", f"{prefix}qkv", (num_rows, width), [query_rows], has_bias)
        yield from _make_linear_specs(
            f"{prefix}qkv.kv", f"{prefix}qkv", (num_rows, width), [range(num_query_rows, num_rows)], has_bias
        )
    attention.num_heads = len(local_heads)
    yield from _replace_with_row_parallel(attention, "out", prefix, query_rows, axis)


def _shard_feed_forward(mlp: nn.Module, prefix: str, axis: Axis) -> Iterator[tuple[str, ShardSpec]]:
    down = mlp.get_submodule("down")
    if not isinstance(down, nn.Linear):
        raise TypeError("the last layer of a feed-forward must be nn.Linear")
    channels = axis.get_local_range(down.in_features)
    for name in ("gate", "up"):
        linear = getattr(mlp, name, None)
        if isinstance(linear, nn.Linear):
            has_bias = linear.bias is not None
            size = (linear.out_features, linear.in_features)
            setattr(mlp, name, nn.Linear(linear.in_features, len(channels), bias=has_bias))
            yield from _make_linear_specs(prefix + name, prefix + name, size, [channels], has_bias)
    yield from _replace_with_row_parallel(mlp, "down", prefix, channels, axis)


def _shard_moe(mixture: MixtureOfExperts, prefix: str, axis: Axis) -> Iterator[tuple[str, ShardSpec]]:
    """Adapt a mixture of experts: each rank routes all positions and has some channels of each expert.

    `parallel.expert_parallel` shards the experts themselves.
    """
    mixture.router.balance_scale = 1 / axis.size
    mixture.reduce_output = partial(axis.reduce_scatter, dim=_SEQ_DIM)
    if mixture.shared is not None:
        yield from _shard_feed_forward(mixture.shared, prefix + "shared.", axis)


def _replace_with_row_parallel(
    parent: nn.Module, name: str, prefix: str, inputs: range, axis: Axis
) -> Iterator[tuple[str, ShardSpec]]:
    linear: nn.Linear = getattr(parent, name)
    setattr(parent, name, RowParallelLinear(len(inputs), linear.out_features, linear.bias is not None, axis))
    weight_name = f"{prefix}{name}.weight"
    yield weight_name, ShardSpec.from_ranges(weight_name, (linear.out_features, linear.in_features), 1, [inputs])


def _make_linear_specs(
    local_name: str, canonical_name: str, size: tuple[int, int], rows: list[range], bias: bool
) -> Iterator[tuple[str, ShardSpec]]:
    yield f"{local_name}.weight", ShardSpec.from_ranges(f"{canonical_name}.weight", size, 0, rows)
    if bias:
        yield f"{local_name}.bias", ShardSpec.from_ranges(f"{canonical_name}.bias", size[:1], 0, rows)


def _scale_range(span: range, width: int) -> range:
    """Return the range of rows of a range of heads, of `width` rows each."""
    return range(span.start * width, span.stop * width)


def _shift_range(span: range, offset: int) -> range:
    return range(span.start + offset, span.stop + offset)


def _get_head_weight_name(spec: ModelSpec) -> str:
    """Return the canonical name of the weight of the head: a tied head has a copy of the embedding table."""
    return "embedding.weight" if spec.tie_embeddings else "head.weight"
