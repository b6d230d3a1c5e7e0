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

from raytrain_hpc.model.decoder import Attention, Decoder, causal_attention, same_document
from raytrain_hpc.model.moe import Router
from raytrain_hpc.parallel.blocking_collectives import wait
from raytrain_hpc.parallel.blockwise_attention import Sight, attend, attend_backward, combine
from raytrain_hpc.parallel.mesh_axis import Axis


def chunk_positions(total: int, ring: int, member: int) -> list[range]:
    """The early and the late chunk of a sequence that a member of the ring holds."""
    chunks = 2 * ring
    return [range(i * total // chunks, (i + 1) * total // chunks) for i in (member, chunks - 1 - member)]


def held_positions(total: int, ring: int, ulysses: int, member: int, share: int) -> list[int]:
    """The positions of a sequence that a rank holds: its share of the chunks of its member of the ring."""
    held = [position for chunk in chunk_positions(total, ring, member) for position in chunk]
    return held[share * len(held) // ulysses : (share + 1) * len(held) // ulysses]


@dataclass(frozen=True)
class Ring:
    """The ring that a rank stands in, and the length of the two chunks of every member."""

    axis: Axis
    chunks: tuple[tuple[int, int], ...]
    total: int

    @classmethod
    def of(cls, axis: Axis, total: int) -> Ring:
        """The ring over an axis for sequences of `total` positions."""
        spans = (chunk_positions(total, axis.size, member) for member in range(axis.size))
        return cls(axis, tuple((len(early), len(late)) for early, late in spans), total)

    def turn(self, tensors: list[Tensor], holder: int) -> tuple[list[Tensor], int]:
        """Give everything to the next member and take what the one before has; whose chunks these now are."""
        axis, source = self.axis, (holder - 1) % self.axis.size
        length = sum(self.chunks[source])
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
        wait(works)
        return received, source

    def sight(self, holder: int, documents: Tensor | None) -> tuple[slice, slice, Sight]:
        """Which of this member's queries see which of the holder's keys, as slices of both, and what of each other.

        Chunks are in global order inside a member: its own keys are a causal square. Of a member before it, the early
        chunk lies before all its queries and the late one behind them; of a member after it, both chunks lie before its
        late queries and behind its early ones.
        """
        me = self.axis.rank
        queries = slice(self.chunks[me][0], None) if holder > me else slice(None)
        keys = slice(0, self.chunks[holder][0]) if holder < me else slice(None)
        if documents is None:
            return queries, keys, Sight(holder == me)
        mine, theirs = self._documents(documents, me)[:, queries], self._documents(documents, holder)[:, keys]
        return queries, keys, Sight(holder == me, same_document(mine, theirs))

    def _documents(self, documents: Tensor, member: int) -> Tensor:
        return torch.cat(
            [documents[:, c.start : c.stop] for c in chunk_positions(self.total, len(self.chunks), member)], 1
        )


class RingAttention(torch.autograd.Function):
    """Causal attention over all chunks: q [b, heads, t, d], k and v [b, kv_heads, t, d] of this rank's positions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, documents: Tensor | None) -> Tensor:
        """[b, heads, t, d]; documents int64 [b, all positions]."""
        me, held = ring.axis.rank, [k, v]
        out, lse = attend(q, k, v, ring.sight(me, documents)[2])
        # Added up in fp32 at least, and in copies: selective recompute keeps what the attention op gave.
        total, lse = out.to(torch.promote_types(out.dtype, torch.float32), copy=True), lse.clone()
        holder = me
        for _ in range(ring.axis.size - 1):
            held, holder = ring.turn(held, holder)
            queries, keys, sight = ring.sight(holder, documents)
            more, more_lse = attend(q[:, :, queries], held[0][:, :, keys], held[1][:, :, keys], sight)
            part = combine(total[:, :, queries], lse[:, :, queries], more, more_lse)
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
            queries, keys, sight = ring.sight(holder, ctx.documents)
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
                held, holder = ring.turn(held[2:], holder)
            else:
                held, holder = ring.turn(held, holder)
        return dq, held[0], held[1], None, None


@dataclass(frozen=True)
class Exchange:
    """Positions for heads: a rank that had some positions of all heads gets all positions of some heads.

    `lengths` are the positions that each rank has, `heads` those that each rank gets; a head can go to several.
    """

    axis: Axis
    lengths: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]

    def heads_for_positions(self, x: Tensor) -> Tensor:
        """[b, heads of this rank, all positions, d] of x [b, all heads, positions of this rank, d]."""
        mine = len(self.heads[self.axis.rank])
        sent = [x[:, list(heads)] for heads in self.heads]
        shapes = [(x.shape[0], mine, length, x.shape[3]) for length in self.lengths]
        return torch.cat(self._all_to_all(sent, shapes), dim=2)

    def positions_for_heads(self, x: Tensor, total_heads: int) -> Tensor:
        """The way back: [b, total_heads, positions of this rank, d]; what several ranks have of a head is summed."""
        length = self.lengths[self.axis.rank]
        shapes = [(x.shape[0], len(heads), length, x.shape[3]) for heads in self.heads]
        received = self._all_to_all(list(torch.split(x, list(self.lengths), dim=2)), shapes)
        whole = x.new_zeros((x.shape[0], total_heads, length, x.shape[3]))
        for heads, part in zip(self.heads, received, strict=True):
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


class HeadsForPositions(torch.autograd.Function):
    """`Exchange.heads_for_positions`, and its reverse for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        """[b, heads of this rank, all positions, d]."""
        ctx.exchange, ctx.total_heads = exchange, x.shape[1]
        return exchange.heads_for_positions(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """[b, all heads, positions of this rank, d]."""
        return ctx.exchange.positions_for_heads(gradients[0], ctx.total_heads), None


class PositionsForHeads(torch.autograd.Function):
    """`Exchange.positions_for_heads`, and its reverse for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, total_heads: int) -> Tensor:
        """[b, all heads, positions of this rank, d]."""
        ctx.exchange = exchange
        return exchange.positions_for_heads(x, total_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """[b, heads of this rank, all positions, d]."""
        return ctx.exchange.heads_for_positions(gradients[0]), None, None


class ContextAttention(nn.Module):
    """Causal attention over whole sequences from a part of the positions; instead of `CausalAttention`."""

    def __init__(self, heads: int, kv_heads: int, total: int, axes: Mapping[str, Axis]):
        super().__init__()
        ring, self._ulysses = axes.get("ring"), axes.get("ulysses")
        self._ring = None if ring is None else Ring.of(ring, total)
        self._heads = heads
        if self._ulysses is None:
            return
        length = total if self._ring is None or ring is None else sum(self._ring.chunks[ring.rank])
        size = self._ulysses.size
        lengths = tuple(len(self._ulysses.share(length, rank)) for rank in range(size))
        mine = [tuple(self._ulysses.share(heads, rank)) for rank in range(size)]
        used = [[head * kv_heads // heads for head in heads_of_rank] for heads_of_rank in mine]
        self._queries = Exchange(self._ulysses, lengths, tuple(mine))
        self._keys = Exchange(self._ulysses, lengths, tuple(tuple(sorted(set(of_rank))) for of_rank in used))
        here = used[self._ulysses.rank]
        runs = {here.count(head) for head in here}
        # Where groups are of different sizes here, every query head gets a key-value head of its own.
        self._repeat = None if len(runs) == 1 else [sorted(set(here)).index(head) for head in here]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """[b, heads, t, head_dim] of q of that shape and k, v [b, kv_heads, t, head_dim], t this rank's positions.

        documents: int64 [b, all positions].
        """
        if self._ulysses is None:
            return self._attend(q, k, v, documents)
        q = HeadsForPositions.apply(q, self._queries)  # type: ignore[no-untyped-call]
        k = HeadsForPositions.apply(k, self._keys)  # type: ignore[no-untyped-call]
        v = HeadsForPositions.apply(v, self._keys)  # type: ignore[no-untyped-call]
        if self._repeat is not None:
            k, v = k[:, self._repeat], v[:, self._repeat]
        mixed: Tensor = PositionsForHeads.apply(self._attend(q, k, v, documents), self._queries, self._heads)  # type: ignore[no-untyped-call]
        return mixed

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        if self._ring is None:
            return causal_attention(q, k, v, documents)
        mixed: Tensor = RingAttention.apply(q, k, v, self._ring, documents)  # type: ignore[no-untyped-call]
        return mixed


def spread(decoder: Decoder, axes: Mapping[str, Axis], seq_len: int) -> None:
    """Make a decoder reach positions on other ranks: its attention, after tensor parallelism shared out the heads, and
    the balance of its experts."""
    sequence = [axes[name] for name in ("ring", "ulysses") if name in axes]
    for module in decoder.modules():
        if isinstance(module, Attention):
            module.mix = ContextAttention(module.heads, module.kv_heads, seq_len, axes)
        elif isinstance(module, Router):
            module.over_sequence = partial(_sum_over, sequence)


def _sum_over(axes: list[Axis], x: Tensor) -> Tensor:
    x = x.clone()
    for axis in axes:
        axis.sum(x)
    return x
