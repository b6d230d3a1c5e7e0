"""Context parallelism: sequences are sharded over ranks; attention covers the full sequence.

Ring attention passes keys and values around a ring of ranks (Liu et al. 2023, arXiv 2310.01889). Each ring rank holds
an early and a late chunk of the sequence, which balances causal work (zigzag order). Ulysses redistributes from
positions to heads by all-to-all (Jacobs et al. 2023, arXiv 2309.14509). Combined, the members of the ring are Ulysses
groups (Fang and Zhao 2024, arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.model.decoder import Attention, CausalAttention, Decoder, make_document_mask
from raytrain_hpc.model.moe import Router
from raytrain_hpc.parallel.blocking_collectives import wait_all
from raytrain_hpc.parallel.blockwise_attention import BlockMask, attend, attend_backward, merge_blocks
from raytrain_hpc.parallel.mesh_axis import Axis


def get_chunk_ranges(seq_len: int, ring_size: int, ring_rank: int) -> list[range]:
    """Return the early and the late chunk of a sequence that a ring rank holds."""
    num_chunks = 2 * ring_size
    return [
        range(i * seq_len // num_chunks, (i + 1) * seq_len // num_chunks)
        for i in (ring_rank, num_chunks - 1 - ring_rank)
    ]


def get_rank_positions(seq_len: int, ring_size: int, ulysses_size: int, ring_rank: int, ulysses_rank: int) -> list[int]:
    """Return the positions of a sequence that a rank holds: the chunks of its ring rank, split over Ulysses ranks."""
    positions = [position for chunk in get_chunk_ranges(seq_len, ring_size, ring_rank) for position in chunk]
    return positions[
        ulysses_rank * len(positions) // ulysses_size : (ulysses_rank + 1) * len(positions) // ulysses_size
    ]


@dataclass(frozen=True)
class Ring:
    """The ring of this rank, and the lengths of the early and the late chunk of every ring rank."""

    axis: Axis
    chunk_lengths: tuple[tuple[int, int], ...]
    seq_len: int

    @classmethod
    def create(cls, axis: Axis, seq_len: int) -> Ring:
        """Create the ring over an axis for sequences of `seq_len` positions."""
        chunk_ranges = (get_chunk_ranges(seq_len, axis.size, ring_rank) for ring_rank in range(axis.size))
        return cls(axis, tuple((len(early), len(late)) for early, late in chunk_ranges), seq_len)

    def rotate(self, tensors: list[Tensor], owner: int) -> tuple[list[Tensor], int]:
        """Send `tensors` to the next ring rank and receive those of the previous one.

        `owner`: the ring rank whose chunks `tensors` are. Returns the received tensors and their owner.
        """
        axis, source = self.axis, (owner - 1) % self.axis.size
        length = sum(self.chunk_lengths[source])
        received = [x.new_empty((*x.shape[:2], length, x.shape[3])) for x in tensors]
        next_rank, previous_rank = (
            dist.get_global_rank(axis.group, (axis.rank + offset) % axis.size) for offset in (1, -1)
        )
        works = []
        for send_buffer, recv_buffer in zip(tensors, received, strict=True):
            axis.traffic.elements += send_buffer.numel()
            works += dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, send_buffer.contiguous(), next_rank, axis.group),
                    dist.P2POp(dist.irecv, recv_buffer, previous_rank, axis.group),
                ]
            )
        wait_all(works)
        return received, source

    def get_block_mask(self, owner: int, documents: Tensor | None) -> tuple[slice, slice, BlockMask]:
        """Return the slices of local queries and of the owner's keys that attend to each other, and their mask.

        Chunks of a ring rank are in global order, so its own keys give a causal square. For an owner of lower rank,
        only the early chunk precedes the local queries, and it precedes all of them. For an owner of higher rank, both
        chunks precede the late local queries and follow the early ones.
        """
        rank = self.axis.rank
        queries = slice(self.chunk_lengths[rank][0], None) if owner > rank else slice(None)
        keys = slice(0, self.chunk_lengths[owner][0]) if owner < rank else slice(None)
        if documents is None:
            return queries, keys, BlockMask(owner == rank)
        query_documents, key_documents = (
            self._select_documents(documents, rank)[:, queries],
            self._select_documents(documents, owner)[:, keys],
        )
        return queries, keys, BlockMask(owner == rank, make_document_mask(query_documents, key_documents))

    def _select_documents(self, documents: Tensor, rank: int) -> Tensor:
        return torch.cat(
            [
                documents[:, chunk.start : chunk.stop]
                for chunk in get_chunk_ranges(self.seq_len, len(self.chunk_lengths), rank)
            ],
            1,
        )


def ring_attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> tuple[Tensor, Tensor]:
    """Return the output [b, heads, t, d] and the log-sum-exp [b, heads, t] of attention over the full sequence.

    q: [b, heads, t, d]; k, v: [b, kv_heads, t, d], t the local positions; documents: int64 [b, seq_len].
    """
    if torch.compiler.is_compiling():
        return torch.ops.raytrain_hpc.ring_attend(q, k, v, documents, ring.axis.name, ring.seq_len)  # type: ignore[no-any-return]
    rank, kv = ring.axis.rank, [k, v]
    out, lse = attend(q, k, v, ring.get_block_mask(rank, documents)[2])
    # Accumulate in fp32 or wider, in copies: selective checkpointing keeps the tensors that the attention op returned.
    total, lse = out.to(torch.promote_types(out.dtype, torch.float32), copy=True), lse.clone()
    owner = rank
    for _ in range(ring.axis.size - 1):
        kv, owner = ring.rotate(kv, owner)
        queries, keys, mask = ring.get_block_mask(owner, documents)
        block_out, block_lse = attend(q[:, :, queries], kv[0][:, :, keys], kv[1][:, :, keys], mask)
        merged = merge_blocks(total[:, :, queries], lse[:, :, queries], block_out, block_lse)
        total[:, :, queries], lse[:, :, queries] = merged
    return total.to(q.dtype), lse


def ring_attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    ring: Ring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. Keys, values and their gradients travel once around the ring."""
    if torch.compiler.is_compiling():
        return torch.ops.raytrain_hpc.ring_attend_backward(  # type: ignore[no-any-return]
            grad_out, q, k, v, out, lse, documents, ring.axis.name, ring.seq_len
        )
    dq = torch.zeros_like(q)
    tensors, owner = [k, v, torch.zeros_like(k), torch.zeros_like(v)], ring.axis.rank
    for hop in range(ring.axis.size):
        queries, keys, mask = ring.get_block_mask(owner, documents)
        block_grads = attend_backward(
            grad_out[:, :, queries],
            q[:, :, queries],
            tensors[0][:, :, keys],
            tensors[1][:, :, keys],
            out[:, :, queries],
            lse[:, :, queries],
            mask,
        )
        dq[:, :, queries] += block_grads[0]
        tensors[2][:, :, keys] += block_grads[1]
        tensors[3][:, :, keys] += block_grads[2]
        if hop == ring.axis.size - 1:
            tensors, owner = ring.rotate(tensors[2:], owner)
        else:
            tensors, owner = ring.rotate(tensors, owner)
    return dq, tensors[0], tensors[1]


class RingAttention(torch.autograd.Function):
    """Differentiable `ring_attend`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, documents: Tensor | None) -> Tensor:
        """Return the attention output [b, heads, t, d]."""
        out, lse = ring_attend(q, k, v, documents, ring)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse, documents)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of q, k and v."""
        q, k, v, out, lse, documents = ctx.saved_tensors
        return *ring_attend_backward(gradients[0], q, k, v, out, lse, documents, ctx.ring), None, None


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
