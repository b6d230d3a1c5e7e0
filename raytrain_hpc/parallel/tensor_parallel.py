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

from raytrain_hpc.config.model_spec import ModelShape
from raytrain_hpc.model.decoder import Attention, Decoder
from raytrain_hpc.model.moe import MixtureOfExperts
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.vocab_parallel import VocabularyEmbedding
from raytrain_hpc.state.shard_spec import Cut

_SEQUENCE = 1  # the dimension of positions in [b, t, ...]


@dataclass
class TensorParallel:
    """What a rank holds of a decoder after `share_out`."""

    cuts: dict[str, Cut] = field(default_factory=dict)  # parameters that are not held whole, by their own names
    partial: list[str] = field(default_factory=list)  # parameters whose gradients are sums over this rank's positions


def share_out(decoder: Decoder, axis: Axis, seq_len: int, made: TensorParallel) -> None:
    """Leave this rank its part of a decoder on the meta device; every sample has `seq_len` positions.

    What that is of which parameter is added to `made`; experts are placed before, by `parallel.experts`.
    """
    shape, dtype = decoder.shape, next(decoder.parameters()).dtype
    gather = partial(_gather_input, axis, seq_len)
    rows = [axis.share(shape.vocab_size)]
    table = (shape.vocab_size, shape.hidden_size)
    if decoder.embedding is not None:
        decoder.embedding = VocabularyEmbedding(shape.vocab_size, shape.hidden_size, axis)  # type: ignore[assignment]
        made.cuts["embedding.weight"] = Cut.along("embedding.weight", table, 0, rows)
    if decoder.positions is not None:
        decoder.positions = _OwnPositions(decoder.positions, axis)  # type: ignore[assignment]
    for number, block in decoder.blocks().items():
        prefix = f"layers.{number}."
        made.cuts |= dict(_attention(block.attention, prefix + "attention.", axis))
        if isinstance(block.mlp, MixtureOfExperts):
            made.cuts |= dict(_mixture(block.mlp, prefix + "mlp.", axis))
        else:
            made.cuts |= dict(_feed_forward(block.mlp, prefix + "mlp.", axis))
        block.attention.register_forward_pre_hook(gather)
        block.mlp.register_forward_pre_hook(gather)
    if decoder.head is not None:
        decoder.head.register_forward_pre_hook(gather)
        if decoder.head.weight is not None:
            decoder.head.weight = nn.Parameter(torch.empty(len(rows[0]), shape.hidden_size))
            made.cuts["head.weight"] = Cut.along(head_name(shape), table, 0, rows)
    decoder.to(dtype)
    made.partial += [name for name, _ in decoder.named_parameters() if _is_partial(name, made.cuts)]


def _is_partial(name: str, cuts: dict[str, Cut]) -> bool:
    """Norms, positions and the biases of row products see this rank's positions only; keys and values that every rank
    holds see this rank's heads only."""
    return name not in cuts or ".qkv.kv." in name


def _gather_input(axis: Axis, seq_len: int, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return axis.gather(inputs[0], _SEQUENCE, seq_len), *inputs[1:]


class _OwnPositions(nn.Module):
    """The learned vectors of this rank's share of the positions."""

    def __init__(self, table: nn.Embedding, axis: Axis):
        super().__init__()
        self._axis, self.weight = axis, table.weight

    def forward(self, positions: Tensor) -> Tensor:
        mine = self._axis.share(positions.shape[-1])
        return F.embedding(positions[..., mine.start : mine.stop], self.weight)


class RowLinear(nn.Module):
    """A product whose inputs are shared out: ranks sum their products, and each keeps its share of the positions."""

    def __init__(self, inputs: int, outputs: int, bias: bool, axis: Axis):
        super().__init__()
        self._axis = axis
        self.product: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, share of t, outputs] of x [b, t, inputs]."""
        return self.complete(self.product(x, self.weight))

    def complete(self, product: Tensor) -> Tensor:
        """What the ranks' products [b, t, outputs] come to."""
        summed = self._axis.scatter_sum(product, _SEQUENCE)
        return summed if self.bias is None else summed + self.bias


class HeadsOfRank(nn.Module):
    """Queries of this rank's heads. Keys and values of all heads are held, and those in use are computed.

    For key-value heads that the axis does not divide. Their weights are small, and held whole they have one simple
    gradient: the sum over ranks.
    """

    def __init__(self, attention: Attention, mine: range, bias: bool):
        super().__init__()
        width, dim = attention.qkv.in_features, attention.head_dim
        self._kv_heads, self._dim = attention.kv_heads, dim
        group = attention.heads // attention.kv_heads
        used = [head // group for head in mine]  # by this rank's query heads, in order
        self._used = sorted(set(used))
        runs = [used.count(head) for head in self._used]
        self.grouped = len(set(runs)) == 1
        # Where groups are of different sizes here, every query head gets a key-value head of its own.
        self._repeat = None if self.grouped else [self._used.index(head) for head in used]
        self.kv_heads = len(self._used) if self.grouped else len(used)
        self.q = nn.Linear(width, len(mine) * dim, bias=bias)
        self.kv = nn.Linear(width, 2 * attention.kv_heads * dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, (heads + 2 kv_heads) * head_dim] of x [b, t, hidden_size], as `Attention` splits it."""
        heads = (2, self._kv_heads, self._dim)
        weight = self.kv.weight.view(*heads, -1)[:, self._used].flatten(0, 2)
        bias = None if self.kv.bias is None else self.kv.bias.view(heads)[:, self._used].flatten()
        kv = F.linear(x, weight, bias)
        if self._repeat is not None:
            kv = kv.view(*kv.shape[:-1], 2, len(self._used), self._dim)[..., self._repeat, :].flatten(-3)
        return torch.cat((self.q(x), kv), dim=-1)


def _attention(attention: Attention, prefix: str, axis: Axis) -> Iterator[tuple[str, Cut]]:
    heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
    width, biased = attention.qkv.in_features, attention.qkv.bias is not None
    mine = axis.share(heads)
    queries, inputs = _times(mine, dim), heads * dim
    rows = inputs + 2 * kv_heads * dim
    if kv_heads % axis.size == 0:
        kv = _times(axis.share(kv_heads), dim)
        spans = [queries, _shifted(kv, inputs), _shifted(kv, inputs + kv_heads * dim)]
        attention.qkv = nn.Linear(width, sum(map(len, spans)), bias=biased)
        attention.kv_heads = kv_heads // axis.size
        yield from _linear_cuts(f"{prefix}qkv", f"{prefix}qkv", (rows, width), spans, biased)
    else:
        split = HeadsOfRank(attention, mine, biased)
        attention.qkv = split  # type: ignore[assignment]
        attention.kv_heads = split.kv_heads
        yield from _linear_cuts(f"{prefix}qkv.q", f"{prefix}qkv", (rows, width), [queries], biased)
        yield from _linear_cuts(f"{prefix}qkv.kv", f"{prefix}qkv", (rows, width), [range(inputs, rows)], biased)
    attention.heads = len(mine)
    yield from _replace_by_row(attention, "out", prefix, queries, axis)


def _feed_forward(mlp: nn.Module, prefix: str, axis: Axis) -> Iterator[tuple[str, Cut]]:
    down = mlp.get_submodule("down")
    if not isinstance(down, nn.Linear):
        raise TypeError("a feed-forward ends in a linear layer")
    channels = axis.share(down.in_features)
    for name in ("gate", "up"):
        column = getattr(mlp, name, None)
        if isinstance(column, nn.Linear):
            biased = column.bias is not None
            size = (column.out_features, column.in_features)
            setattr(mlp, name, nn.Linear(column.in_features, len(channels), bias=biased))
            yield from _linear_cuts(prefix + name, prefix + name, size, [channels], biased)
    yield from _replace_by_row(mlp, "down", prefix, channels, axis)


def _mixture(mixture: MixtureOfExperts, prefix: str, axis: Axis) -> Iterator[tuple[str, Cut]]:
    """Every rank routes all positions and has some channels of every expert (`parallel.experts`)."""
    mixture.router.share = 1 / axis.size
    mixture.complete = partial(axis.scatter_sum, dim=_SEQUENCE)
    if mixture.shared is not None:
        yield from _feed_forward(mixture.shared, prefix + "shared.", axis)


def _replace_by_row(parent: nn.Module, name: str, prefix: str, inputs: range, axis: Axis) -> Iterator[tuple[str, Cut]]:
    whole: nn.Linear = getattr(parent, name)
    setattr(parent, name, RowLinear(len(inputs), whole.out_features, whole.bias is not None, axis))
    weight = f"{prefix}{name}.weight"
    yield weight, Cut.along(weight, (whole.out_features, whole.in_features), 1, [inputs])


def _linear_cuts(
    own: str, canonical: str, size: tuple[int, int], rows: list[range], bias: bool
) -> Iterator[tuple[str, Cut]]:
    yield f"{own}.weight", Cut.along(f"{canonical}.weight", size, 0, rows)
    if bias:
        yield f"{own}.bias", Cut.along(f"{canonical}.bias", size[:1], 0, rows)


def _times(span: range, width: int) -> range:
    """The rows of these heads."""
    return range(span.start * width, span.stop * width)


def _shifted(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def head_name(shape: ModelShape) -> str:
    """Whose weight the head of a last stage has: a tied one keeps a copy of the embedding's table."""
    return "embedding.weight" if shape.tie_embeddings else "head.weight"
