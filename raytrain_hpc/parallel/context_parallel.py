"""Context parallelism: every rank of an axis holds a part of each sequence, and attention reaches all of it.

Ring attention passes keys and values around (Liu et al. 2023, arXiv 2310.01889); members hold an early and a late chunk
each, so that causal work is even (zigzag order). Ulysses exchanges positions for heads (Jacobs et al. 2023, arXiv
2309.14509). Their product is a ring of groups that exchange heads inside (Fang and Zhao 2024, arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.model.decoder import Attention, Decoder, causal_attention, make_document_mask
from raytrain_hpc.model.moe import Router
from raytrain_hpc.parallel.blocking_collectives import wait_all
from raytrain_hpc.parallel.blockwise_attention import BlockMask, attend, attend_backward, merge_blocks
from raytrain_hpc.parallel.mesh_axis import Axis


def get_chunk_ranges(seq_len: int, ring_size: int, ring_rank: int) -> list[range]:
    """The early and the late chunk of a sequence that a member of the ring holds."""
    chunks = 2 * ring_size
    return [range(i * seq_len // chunks, (i + 1) * seq_len // chunks) for i in (ring_rank, chunks - 1 - ring_rank)]


def get_rank_positions(seq_len: int, ring_size: int, ulysses_size: int, ring_rank: int, ulysses_rank: int) -> list[int]:
    """The positions of a sequence that a rank holds: its share of the chunks of its member of the ring."""
    held = [position for chunk in get_chunk_ranges(seq_len, ring_size, ring_rank) for position in chunk]
    return held[ulysses_rank * len(held) // ulysses_size : (ulysses_rank + 1) * len(held) // ulysses_size]


@dataclass(frozen=True)
class Ring:
    """The ring that a rank stands in, and the length of the two chunks of every member."""

    axis: Axis
    chunk_lengths: tuple[tuple[int, int], ...]
    seq_len: int

    @classmethod
    def create(cls, axis: Axis, seq_len: int) -> Ring:
        """The ring over an axis for sequences of `total` positions."""
        spans = (get_chunk_ranges(seq_len, axis.size, member) for member in range(axis.size))
        return cls(axis, tuple((len(early), len(late)) for early, late in spans), seq_len)

    def rotate(self, tensors: list[Tensor], owner: int) -> tuple[list[Tensor], int]:
        """Give everything to the next member and take what the one before has; whose chunks these now are."""
        axis, source = self.axis, (owner - 1) % self.axis.size
        length = sum(self.chunk_lengths[source])
        received = [x.new_empty((*x.shape[:2], length, x.shape[3])) for x in tensors]
        after, before = (dist.get_global_rank(axis.group, (axis.rank + by) % axis.size) for by in (1, -1))
        works = []
        for sent, taken in zip(tensors, received, strict=True):
            axis.traffic.elements += sent.numel()
            works += dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent.contiguous(), after, axis.group),
                    dist.P2POp(dist.irecv, taken, before, axis.group),
                ]
            )
        wait_all(works)
        return received, source

    def get_block_mask(self, owner: int, documents: Tensor | None) -> tuple[slice, slice, BlockMask]:
        """Which of this member's queries see which of the holder's keys, as slices of both, and what of each other.

        Chunks are in global order inside a member: its own keys are a causal square. Of a member before it, the early
        chunk lies before all its queries and the late one behind them; of a member after it, both chunks lie before its
        late queries and behind its early ones.
        """
        me = self.axis.rank
        queries = slice(self.chunk_lengths[me][0], None) if owner > me else slice(None)
        keys = slice(0, self.chunk_lengths[owner][0]) if owner < me else slice(None)
        if documents is None:
            return queries, keys, BlockMask(owner == me)
        mine, theirs = (
            self._select_documents(documents, me)[:, queries],
            self._select_documents(documents, owner)[:, keys],
        )
        return queries, keys, BlockMask(owner == me, make_document_mask(mine, theirs))

    def _select_documents(self, documents: Tensor, rank: int) -> Tensor:
        return torch.cat(
            [documents[:, c.start : c.stop] for c in get_chunk_ranges(self.seq_len, len(self.chunk_lengths), rank)], 1
        )


class RingAttention(torch.autograd.Function):
    """Causal attention over all chunks: q [b, heads, t, d], k and v [b, kv_heads, t, d] of this rank's positions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, documents: Tensor | None) -> Tensor:
        """[b, heads, t, d]; documents int64 [b, all positions]."""
        me, held = ring.axis.rank, [k, v]
        out, lse = attend(q, k, v, ring.get_block_mask(me, documents)[2])
        # Added up in fp32 at least, and in copies: selective recompute keeps what the attention op gave.
        total, lse = out.to(torch.promote_types(out.dtype, torch.float32), copy=True), lse.clone()
        holder = me
        for _ in range(ring.axis.size - 1):
            held, holder = ring.rotate(held, holder)
            queries, keys, sight = ring.get_block_mask(holder, documents)
            more, more_lse = attend(q[:, :, queries], held[0][:, :, keys], held[1][:, :, keys], sight)
            part = merge_blocks(total[:, :, queries], lse[:, :, queries], more, more_lse)
            total[:, :, queries], lse[:, :, queries] = part
        out = total.to(q.dtype)
        ctx.ring, ctx.documents = ring, documents
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Keys, values and their gradients go around together, and come home after a full round."""
        q, k, v, out, lse = ctx.saved_tensors
        ring, slope = ctx.ring, gradients[0]
        dq = torch.zeros_like(q)
        held, holder = [k, v, torch.zeros_like(k), torch.zeros_like(v)], ring.axis.rank
        for turn in range(ring.axis.size):
            queries, keys, sight = ring.get_block_mask(holder, ctx.documents)
            parts = attend_backward(
                slope[:, :, queries],
                q[:, :, queries],
                held[0][:, :, keys],
                held[1][:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                sight,
            )
            dq[:, :, queries] += parts[0]
            held[2][:, :, keys] += parts[1]
            held[3][:, :, keys] += parts[2]
            if turn == ring.axis.size - 1:
                held, holder = ring.rotate(held[2:], holder)
            else:
                held, holder = ring.rotate(held, holder)
        return dq, held[0], held[1], None, None


@dataclass(frozen=True)
class UlyssesExchange:
    """Positions for heads: a rank that had some positions of all heads gets all positions of some heads.

    `lengths` are the positions that each rank has, `heads` those that each rank gets; a head can go to several.
    """

    axis: Axis
    lengths_by_rank: tuple[int, ...]
    heads_by_rank: tuple[tuple[int, ...], ...]

    def gather_positions(self, x: Tensor) -> Tensor:
        """[b, heads of this rank, all positions, d] of x [b, all heads, positions of this rank, d]."""
        mine = len(self.heads_by_rank[self.axis.rank])
        sent = [x[:, list(heads)] for heads in self.heads_by_rank]
        shapes = [(x.shape[0], mine, length, x.shape[3]) for length in self.lengths_by_rank]
        return torch.cat(self._all_to_all(sent, shapes), dim=2)

    def gather_heads(self, x: Tensor, num_heads: int) -> Tensor:
        """The way back: [b, total_heads, positions of this rank, d]; what several ranks have of a head is summed."""
        length = self.lengths_by_rank[self.axis.rank]
        shapes = [(x.shape[0], len(heads), length, x.shape[3]) for heads in self.heads_by_rank]
        received = self._all_to_all(list(torch.split(x, list(self.lengths_by_rank), dim=2)), shapes)
        whole = x.new_zeros((x.shape[0], num_heads, length, x.shape[3]))
        for heads, part in zip(self.heads_by_rank, received, strict=True):
            whole.index_add_(1, torch.tensor(heads, device=x.device), part)
        return whole

    def _all_to_all(self, sent: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        outgoing = [part.numel() for part in sent]
        incoming = [torch.Size(shape).numel() for shape in shapes]
        received = sent[0].new_empty(sum(incoming))
        flat = torch.cat([part.reshape(-1) for part in sent])
        self.axis.traffic.elements += sum(outgoing) - outgoing[self.axis.rank]
        dist.all_to_all_single(received, flat, incoming, outgoing, group=self.axis.group)
        return [part.view(shape) for part, shape in zip(torch.split(received, incoming), shapes, strict=True)]


class GatherPositions(torch.autograd.Function):
    """`Exchange.heads_for_positions`, and its reverse for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: UlyssesExchange) -> Tensor:
        """[b, heads of this rank, all positions, d]."""
        ctx.exchange, ctx.total_heads = exchange, x.shape[1]
        return exchange.gather_positions(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """[b, all heads, positions of this rank, d]."""
        return ctx.exchange.gather_heads(gradients[0], ctx.total_heads), None


class GatherHeads(torch.autograd.Function):
    """`Exchange.positions_for_heads`, and its reverse for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: UlyssesExchange, num_heads: int) -> Tensor:
        """[b, all heads, positions of this rank, d]."""
        ctx.exchange = exchange
        return exchange.gather_heads(x, num_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """[b, heads of this rank, all positions, d]."""
        return ctx.exchange.gather_positions(gradients[0]), None, None


class ContextParallelAttention(nn.Module):
    """Causal attention over whole sequences from a part of the positions; instead of `CausalAttention`."""

    def __init__(self, num_heads: int, num_kv_heads: int, seq_len: int, axes: Mapping[str, Axis]):
        super().__init__()
        ring, self._ulysses = axes.get("ring"), axes.get("ulysses")
        self._ring = None if ring is None else Ring.create(ring, seq_len)
        self._num_heads = num_heads
        if self._ulysses is None:
            return
        length = seq_len if self._ring is None or ring is None else sum(self._ring.chunk_lengths[ring.rank])
        size = self._ulysses.size
        lengths = tuple(len(self._ulysses.get_local_range(length, rank)) for rank in range(size))
        mine = [tuple(self._ulysses.get_local_range(num_heads, rank)) for rank in range(size)]
        used = [[head * num_kv_heads // num_heads for head in heads_of_rank] for heads_of_rank in mine]
        self._query_exchange = UlyssesExchange(self._ulysses, lengths, tuple(mine))
        self._kv_exchange = UlyssesExchange(
            self._ulysses, lengths, tuple(tuple(sorted(set(of_rank))) for of_rank in used)
        )
        here = used[self._ulysses.rank]
        runs = {here.count(head) for head in here}
        # Where groups are of different sizes here, every query head gets a key-value head of its own.
        self._kv_index = None if len(runs) == 1 else [sorted(set(here)).index(head) for head in here]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """[b, heads, t, head_dim] of q of that shape and k, v [b, kv_heads, t, head_dim], t this rank's positions.

        documents: int64 [b, all positions].
        """
        if self._ulysses is None:
            return self._attend(q, k, v, documents)
        q = GatherPositions.apply(q, self._query_exchange)  # type: ignore[no-untyped-call]
        k = GatherPositions.apply(k, self._kv_exchange)  # type: ignore[no-untyped-call]
        v = GatherPositions.apply(v, self._kv_exchange)  # type: ignore[no-untyped-call]
        if self._kv_index is not None:
            k, v = k[:, self._kv_index], v[:, self._kv_index]
        mixed: Tensor = GatherHeads.apply(self._attend(q, k, v, documents), self._query_exchange, self._num_heads)  # type: ignore[no-untyped-call]
        return mixed

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        if self._ring is None:
            return causal_attention(q, k, v, documents)
        mixed: Tensor = RingAttention.apply(q, k, v, self._ring, documents)  # type: ignore[no-untyped-call]
        return mixed


def apply_context_parallel(decoder: Decoder, axes: Mapping[str, Axis], seq_len: int) -> None:
    """Make a decoder reach positions on other ranks: its attention, after tensor parallelism shared out the heads, and
    the balance of its experts."""
    sequence = [axes[name] for name in ("ring", "ulysses") if name in axes]
    for module in decoder.modules():
        if isinstance(module, Attention):
            module.core_attention = ContextParallelAttention(module.num_heads, module.num_kv_heads, seq_len, axes)
        elif isinstance(module, Router):
            module.reduce_counts = partial(_all_reduce_axes, sequence)


def _all_reduce_axes(axes: list[Axis], x: Tensor) -> Tensor:
    x = x.clone()
    for axis in axes:
        axis.all_reduce(x)
    return x
