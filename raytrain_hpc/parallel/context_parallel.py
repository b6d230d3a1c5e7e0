"""Context parallelism: sequences are sharded over ranks; attention covers the full sequence.

Ring attention passes keys and values around a ring of ranks (`ring_attention`). Ulysses redistributes from positions to
heads by all-to-all (Jacobs et al. 2023, arXiv 2309.14509). Combined, the members of the ring are Ulysses groups (Fang
and Zhao 2024, arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.model.decoder import Attention, CausalAttention, Decoder
from raytrain_hpc.model.moe import Router
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.ring_attention import Ring, RingAttention, get_chunk_ranges


def get_rank_positions(seq_len: int, ring_size: int, ulysses_size: int, ring_rank: int, ulysses_rank: int) -> list[int]:
    """Return the positions of a sequence that a rank holds: the chunks of its ring rank, split over Ulysses ranks."""
    positions = [position for chunk in get_chunk_ranges(seq_len, ring_size, ring_rank) for position in chunk]
    return positions[
        ulysses_rank * len(positions) // ulysses_size : (ulysses_rank + 1) * len(positions) // ulysses_size
    ]


@dataclass(frozen=True)
class UlyssesExchange:
    """All-to-all between sharding by positions and sharding by heads.

    `lengths_by_rank`: number of positions per rank. `heads_by_rank`: heads per rank; several ranks can have the same
    key-value head.
    """

    axis: Axis
    lengths_by_rank: tuple[int, ...]
    heads_by_rank: tuple[tuple[int, ...], ...]

    def gather_positions(self, x: Tensor) -> Tensor:
        """Redistribute x [b, all heads, local positions, d] to [b, local heads, all positions, d]."""
        num_local_heads = len(self.heads_by_rank[self.axis.rank])
        send_buffers = [x[:, list(heads)] for heads in self.heads_by_rank]
        shapes = [(x.shape[0], num_local_heads, length, x.shape[3]) for length in self.lengths_by_rank]
        return torch.cat(self._all_to_all(send_buffers, shapes), dim=2)

    def gather_heads(self, x: Tensor, num_heads: int) -> Tensor:
        """Redistribute x [b, local heads, all positions, d] to [b, num_heads, local positions, d].

        A head that several ranks have is summed over them.
        """
        length = self.lengths_by_rank[self.axis.rank]
        shapes = [(x.shape[0], len(heads), length, x.shape[3]) for heads in self.heads_by_rank]
        received = self._all_to_all(list(torch.split(x, list(self.lengths_by_rank), dim=2)), shapes)
        gathered = x.new_zeros((x.shape[0], num_heads, length, x.shape[3]))
        for heads, shard in zip(self.heads_by_rank, received, strict=True):
            gathered.index_add_(1, torch.tensor(heads, device=x.device), shard)
        return gathered

    def _all_to_all(self, send_buffers: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        send_sizes = [buffer.numel() for buffer in send_buffers]
        recv_sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.cat([buffer.reshape(-1) for buffer in send_buffers])
        received = self.axis.all_to_all(flat, recv_sizes, send_sizes)
        return [buffer.view(shape) for buffer, shape in zip(torch.split(received, recv_sizes), shapes, strict=True)]


class GatherPositions(torch.autograd.Function):
    """Differentiable `UlyssesExchange.gather_positions`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: UlyssesExchange) -> Tensor:
        """Return [b, local heads, all positions, d]."""
        ctx.exchange, ctx.num_heads = exchange, x.shape[1]
        return exchange.gather_positions(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the input, [b, all heads, local positions, d]."""
        return ctx.exchange.gather_heads(gradients[0], ctx.num_heads), None


class GatherHeads(torch.autograd.Function):
    """Differentiable `UlyssesExchange.gather_heads`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: UlyssesExchange, num_heads: int) -> Tensor:
        """Return [b, all heads, local positions, d]."""
        ctx.exchange = exchange
        return exchange.gather_heads(x, num_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the input, [b, local heads, all positions, d]."""
        return ctx.exchange.gather_positions(gradients[0]), None, None


class ContextParallelAttention(nn.Module):
    """Causal attention over full sequences from the local positions of q, k and v. Replaces `CausalAttention`."""

    def __init__(self, num_heads: int, num_kv_heads: int, seq_len: int, axes: Mapping[str, Axis]):
        super().__init__()
        ring, self._ulysses = axes.get("ring"), axes.get("ulysses")
        self._ring = None if ring is None else Ring.create(ring, seq_len)
        self._num_heads = num_heads
        self.local_attention: nn.Module = CausalAttention()  # over full sequences, after Ulysses' exchange
        if self._ulysses is None:
            return
        length = seq_len if self._ring is None or ring is None else sum(self._ring.chunk_lengths[ring.rank])
        size = self._ulysses.size
        lengths = tuple(len(self._ulysses.get_local_range(length, rank)) for rank in range(size))
        heads_by_rank = [tuple(self._ulysses.get_local_range(num_heads, rank)) for rank in range(size)]
        kv_heads_by_rank = [
            [head * num_kv_heads // num_heads for head in heads_of_rank] for heads_of_rank in heads_by_rank
        ]
        self._query_exchange = UlyssesExchange(self._ulysses, lengths, tuple(heads_by_rank))
        self._kv_exchange = UlyssesExchange(
            self._ulysses, lengths, tuple(tuple(sorted(set(kv_heads))) for kv_heads in kv_heads_by_rank)
        )
        local_kv_heads = kv_heads_by_rank[self._ulysses.rank]
        group_sizes = {local_kv_heads.count(head) for head in local_kv_heads}
        # If key-value heads serve different numbers of local query heads, repeat them to one per query head.
        self._kv_index = (
            None if len(group_sizes) == 1 else [sorted(set(local_kv_heads)).index(head) for head in local_kv_heads]
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Return the output [b, heads, t, head_dim], t the local positions.

        q: [b, heads, t, head_dim]; k, v: [b, kv_heads, t, head_dim]; documents: int64 [b, seq_len].
        """
        if self._ulysses is None:
            return self._attend(q, k, v, documents)
        q = GatherPositions.apply(q, self._query_exchange)  # type: ignore[no-untyped-call]
        k = GatherPositions.apply(k, self._kv_exchange)  # type: ignore[no-untyped-call]
        v = GatherPositions.apply(v, self._kv_exchange)  # type: ignore[no-untyped-call]
        if self._kv_index is not None:
            k, v = k[:, self._kv_index], v[:, self._kv_index]
        output: Tensor = GatherHeads.apply(self._attend(q, k, v, documents), self._query_exchange, self._num_heads)  # type: ignore[no-untyped-call]
        return output

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        if self._ring is None:
            attended: Tensor = self.local_attention(q, k, v, documents)
            return attended
        output: Tensor = RingAttention.apply(q, k, v, self._ring, documents)  # type: ignore[no-untyped-call]
        return output


def apply_context_parallel(decoder: Decoder, axes: Mapping[str, Axis], seq_len: int) -> None:
    """Replace the attention of a decoder by context-parallel attention, in place. Does nothing without a cp axis.

    Routers then count the positions per expert over the full sequence. Call after `apply_tensor_parallel`, which shards
    the heads.
    """
    sequence_axes = [axes[name] for name in ("ring", "ulysses") if name in axes]
    if not sequence_axes:
        return
    for module in decoder.modules():
        if isinstance(module, Attention):
            module.core_attention = ContextParallelAttention(module.num_heads, module.num_kv_heads, seq_len, axes)
        elif isinstance(module, Router):
            module.reduce_counts = partial(_all_reduce_axes, sequence_axes)


def _all_reduce_axes(axes: list[Axis], x: Tensor) -> Tensor:
    x = x.clone()  # the sum is in place
    for axis in axes:
        axis.all_reduce(x)
    return x
