"""Tensor parallelism with sequence parallelism: every rank of an axis holds some heads, some of the feed-forward's
channels and some rows of the vocabulary, and between the products some positions of the residual stream.

Column and row products after Shoeybi et al. 2019 (arXiv 1909.08053), the sequence between them after Korthikanti et al.
2022 (arXiv 2205.05198): positions are gathered before a column product and summed into shares after a row product.
Nothing need divide evenly: heads, channels, rows and positions are shared out in runs at most one apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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


@dataclass
class TensorParallelSpec:
    """What a rank holds of a decoder after `share_out`."""

    shard_specs: dict[str, ShardSpec] = field(
        default_factory=dict
    )  # parameters that are not held whole, by their own names
    partial_grads: list[str] = field(
        default_factory=list
    )  # parameters whose gradients are sums over this rank's positions


def apply_tensor_parallel(decoder: Decoder, axis: Axis, seq_len: int, tp_spec: TensorParallelSpec) -> None:
    """Leave this rank its part of a decoder on the meta device; every sample has `seq_len` positions.

    What that is of which parameter is added to `made`; experts are placed before, by `parallel.experts`.
    """
    shape, dtype = decoder.spec, next(decoder.parameters()).dtype
    gather = partial(_all_gather_input, axis, seq_len)
    rows = [axis.get_local_range(shape.vocab_size)]
    table = (shape.vocab_size, shape.hidden_size)
    if decoder.embedding is not None:
        decoder.embedding = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, axis)  # type: ignore[assignment]
        tp_spec.shard_specs["embedding.weight"] = ShardSpec.from_ranges("embedding.weight", table, 0, rows)
    if decoder.positions is not None:
        decoder.positions = _LocalPositionEmbedding(decoder.positions, axis)  # type: ignore[assignment]
    for number, block in decoder.blocks().items():
        prefix = f"layers.{number}."
        tp_spec.shard_specs |= dict(_shard_attention(block.attention, prefix + "attention.", axis))
        if isinstance(block.mlp, MixtureOfExperts):
            tp_spec.shard_specs |= dict(_shard_moe(block.mlp, prefix + "mlp.", axis))
        else:
            tp_spec.shard_specs |= dict(_shard_feed_forward(block.mlp, prefix + "mlp.", axis))
        block.attention.register_forward_pre_hook(gather)
        block.mlp.register_forward_pre_hook(gather)
    if decoder.head is not None:
        decoder.head.register_forward_pre_hook(gather)
        if decoder.head.weight is not None:
            decoder.head.weight = nn.Parameter(torch.empty(len(rows[0]), shape.hidden_size))
            tp_spec.shard_specs["head.weight"] = ShardSpec.from_ranges(get_head_weight_name(shape), table, 0, rows)
    decoder.to(dtype)
    tp_spec.partial_grads += [
        name for name, _ in decoder.named_parameters() if _has_partial_grad(name, tp_spec.shard_specs)
    ]


def _has_partial_grad(name: str, shard_specs: dict[str, ShardSpec]) -> bool:
    """Norms, positions and the biases of row products see this rank's positions only; keys and values that every rank
    holds see this rank's heads only."""
    return name not in shard_specs or ".qkv.kv." in name


def _all_gather_input(axis: Axis, seq_len: int, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return axis.all_gather(inputs[0], _SEQ_DIM, seq_len), *inputs[1:]


class _LocalPositionEmbedding(nn.Module):
    """The learned vectors of this rank's share of the positions."""

    def __init__(self, table: nn.Embedding, axis: Axis):
        super().__init__()
        self._axis, self.weight = axis, table.weight

    def forward(self, positions: Tensor) -> Tensor:
        mine = self._axis.get_local_range(positions.shape[-1])
        return F.embedding(positions[..., mine.start : mine.stop], self.weight)


class RowParallelLinear(nn.Module):
    """A product whose inputs are shared out: ranks sum their products, and each keeps its share of the positions."""

    def __init__(self, in_features: int, out_features: int, bias: bool, axis: Axis):
        super().__init__()
        self._axis = axis
        self.product: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, share of t, outputs] of x [b, t, inputs]."""
        return self.reduce_output(self.product(x, self.weight))

    def reduce_output(self, product: Tensor) -> Tensor:
        """What the ranks' products [b, t, outputs] come to."""
        summed = self._axis.reduce_scatter(product, _SEQ_DIM)
        return summed if self.bias is None else summed + self.bias


class ReplicatedKVLinear(nn.Module):
    """Queries of this rank's heads. Keys and values of all heads are held, and those in use are computed.

    For key-value heads that the axis does not divide. Their weights are small, and held whole they have one simple
    gradient: the sum over ranks.
    """

    def __init__(self, attention: Attention, local_heads: range, bias: bool):
        super().__init__()
        width, dim = attention.qkv.in_features, attention.head_dim
        self._num_kv_heads, self._head_dim = attention.num_kv_heads, dim
        group = attention.num_heads // attention.num_kv_heads
        used = [head // group for head in local_heads]  # by this rank's query heads, in order
        self._kv_head_indices = sorted(set(used))
        runs = [used.count(head) for head in self._kv_head_indices]
        self.is_grouped = len(set(runs)) == 1
        # Where groups are of different sizes here, every query head gets a key-value head of its own.
        self._kv_index = None if self.is_grouped else [self._kv_head_indices.index(head) for head in used]
        self.num_kv_heads = len(self._kv_head_indices) if self.is_grouped else len(used)
        self.q = nn.Linear(width, len(local_heads) * dim, bias=bias)
        self.kv = nn.Linear(width, 2 * attention.num_kv_heads * dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, (heads + 2 kv_heads) * head_dim] of x [b, t, hidden_size], as `Attention` splits it."""
        heads = (2, self._num_kv_heads, self._head_dim)
        weight = self.kv.weight.view(*heads, -1)[:, self._kv_head_indices].flatten(0, 2)
        bias = None if self.kv.bias is None else self.kv.bias.view(heads)[:, self._kv_head_indices].flatten()
        kv = F.linear(x, weight, bias)
        if self._kv_index is not None:
            kv = kv.view(*kv.shape[:-1], 2, len(self._kv_head_indices), self._head_dim)[..., self._kv_index, :].flatten(
                -3
            )
        return torch.cat((self.q(x), kv), dim=-1)


def _shard_attention(attention: Attention, prefix: str, axis: Axis) -> Iterator[tuple[str, ShardSpec]]:
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    width, biased = attention.qkv.in_features, attention.qkv.bias is not None
    mine = axis.get_local_range(heads)
    queries, inputs = _scale_range(mine, dim), heads * dim
    rows = inputs + 2 * kv_heads * dim
    if kv_heads % axis.size == 0:
        kv = _scale_range(axis.get_local_range(kv_heads), dim)
        spans = [queries, _shift_range(kv, inputs), _shift_range(kv, inputs + kv_heads * dim)]
        attention.qkv = nn.Linear(width, sum(map(len, spans)), bias=biased)
        attention.num_kv_heads = kv_heads // axis.size
        yield from _make_linear_specs(f"{prefix}qkv", f"{prefix}qkv", (rows, width), spans, biased)
    else:
        split = ReplicatedKVLinear(attention, mine, biased)
        attention.qkv = split  # type: ignore[assignment]
        attention.num_kv_heads = split.num_kv_heads
        yield from _make_linear_specs(f"{prefix}qkv.q", f"{prefix}qkv", (rows, width), [queries], biased)
        yield from _make_linear_specs(f"{prefix}qkv.kv", f"{prefix}qkv", (rows, width), [range(inputs, rows)], biased)
    attention.num_heads = len(mine)
    yield from _replace_with_row_parallel(attention, "out", prefix, queries, axis)


def _shard_feed_forward(mlp: nn.Module, prefix: str, axis: Axis) -> Iterator[tuple[str, ShardSpec]]:
    down = mlp.get_submodule("down")
    if not isinstance(down, nn.Linear):
        raise TypeError("a feed-forward ends in a linear layer")
    channels = axis.get_local_range(down.in_features)
    for name in ("gate", "up"):
        column = getattr(mlp, name, None)
        if isinstance(column, nn.Linear):
            biased = column.bias is not None
            size = (column.out_features, column.in_features)
            setattr(mlp, name, nn.Linear(column.in_features, len(channels), bias=biased))
            yield from _make_linear_specs(prefix + name, prefix + name, size, [channels], biased)
    yield from _replace_with_row_parallel(mlp, "down", prefix, channels, axis)


def _shard_moe(mixture: MixtureOfExperts, prefix: str, axis: Axis) -> Iterator[tuple[str, ShardSpec]]:
    """Every rank routes all positions and has some channels of every expert (`parallel.experts`)."""
    mixture.router.balance_scale = 1 / axis.size
    mixture.reduce_output = partial(axis.reduce_scatter, dim=_SEQ_DIM)
    if mixture.shared is not None:
        yield from _shard_feed_forward(mixture.shared, prefix + "shared.", axis)


def _replace_with_row_parallel(
    parent: nn.Module, name: str, prefix: str, inputs: range, axis: Axis
) -> Iterator[tuple[str, ShardSpec]]:
    whole: nn.Linear = getattr(parent, name)
    setattr(parent, name, RowParallelLinear(len(inputs), whole.out_features, whole.bias is not None, axis))
    weight = f"{prefix}{name}.weight"
    yield weight, ShardSpec.from_ranges(weight, (whole.out_features, whole.in_features), 1, [inputs])


def _make_linear_specs(
    own: str, canonical: str, size: tuple[int, int], rows: list[range], bias: bool
) -> Iterator[tuple[str, ShardSpec]]:
    yield f"{own}.weight", ShardSpec.from_ranges(f"{canonical}.weight", size, 0, rows)
    if bias:
        yield f"{own}.bias", ShardSpec.from_ranges(f"{canonical}.bias", size[:1], 0, rows)


def _scale_range(span: range, width: int) -> range:
    """The rows of these heads."""
    return range(span.start * width, span.stop * width)


def _shift_range(span: range, offset: int) -> range:
    return range(span.start + offset, span.stop + offset)


def get_head_weight_name(shape: ModelSpec) -> str:
    """Whose weight the head of a last stage has: a tied one keeps a copy of the embedding's table."""
    return "embedding.weight" if shape.tie_embeddings else "head.weight"
