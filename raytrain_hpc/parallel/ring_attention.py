"""Ring attention: keys and values pass around a ring of ranks (Liu et al. 2023, arXiv 2310.01889).

Each rank holds an early and a late chunk of the sequence, which balances causal work (zigzag order). While a rank
attends to a block of keys, it receives keys and values of the next block and sends gradients of the block before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.model.decoder import make_document_mask
from raytrain_hpc.parallel.blocking_collectives import wait_all
from raytrain_hpc.parallel.blockwise_attention import BlockMask, attend, attend_backward, merge_blocks
from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.segment_attention import (
    SegmentMask,
    attend_segments,
    attend_segments_backward,
    find_segments,
)


def get_chunk_ranges(seq_len: int, ring_size: int, ring_rank: int) -> list[range]:
    """Return the early and the late chunk of a sequence that a ring rank holds."""
    num_chunks = 2 * ring_size
    return [
        range(i * seq_len // num_chunks, (i + 1) * seq_len // num_chunks)
        for i in (ring_rank, num_chunks - 1 - ring_rank)
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

    def get_previous(self, owner: int) -> int:
        """Return the owner of the tensors that arrive after those of `owner`."""
        return (owner - 1) % self.axis.size

    def start_rotation(self, tensors: list[Tensor], owner: int) -> Rotation:
        """Start to send `tensors` to the next ring rank and to receive those of the previous one.

        `owner`: the ring rank whose chunks `tensors` are. Do not change them before the rotation ends.
        """
        axis = self.axis
        sent = [x.contiguous() for x in tensors]
        length = sum(self.chunk_lengths[self.get_previous(owner)])
        received = [x.new_empty((*x.shape[:2], length, x.shape[3])) for x in tensors]
        next_rank, previous_rank = (
            dist.get_global_rank(axis.group, (axis.rank + offset) % axis.size) for offset in (1, -1)
        )
        works: list[dist.Work] = []
        for send_buffer, recv_buffer in zip(sent, received, strict=True):
            axis.traffic.elements += send_buffer.numel()
            axis.tracer.add("sent", "ring attention", send_buffer)
            works += dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, send_buffer, next_rank, axis.group),
                    dist.P2POp(dist.irecv, recv_buffer, previous_rank, axis.group),
                ]
            )
        return Rotation(sent, received, works, axis.tracer)

    def get_block_mask(self, owner: int, documents: Tensor | None) -> tuple[slice, slice, BlockMask | SegmentMask]:
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
        if documents.device.type == "cpu":
            return queries, keys, SegmentMask(find_segments(query_documents, key_documents), owner == rank)
        return queries, keys, BlockMask(owner == rank, make_document_mask(query_documents, key_documents))

    def _select_documents(self, documents: Tensor, rank: int) -> Tensor:
        return torch.cat(
            [
                documents[:, chunk.start : chunk.stop]
                for chunk in get_chunk_ranges(self.seq_len, len(self.chunk_lengths), rank)
            ],
            1,
        )


class Rotation(NamedTuple):
    """Tensors on their way to the next ring rank."""

    sent: list[Tensor]  # kept until they are sent
    received: list[Tensor]
    works: list[dist.Work]
    tracer: ComputationTracer

    def wait(self) -> list[Tensor]:
        """Return the received tensors."""
        wait_all(self.works)
        for tensor in self.received:
            self.tracer.add("received", "ring attention", tensor)
        return self.received


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | SegmentMask) -> tuple[Tensor, Tensor]:
    return attend_segments(q, k, v, mask) if isinstance(mask, SegmentMask) else attend(q, k, v, mask)


def _attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask | SegmentMask
) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(mask, SegmentMask):
        return attend_segments_backward(grad_out, q, k, v, out, lse, mask)
    return attend_backward(grad_out, q, k, v, out, lse, mask)


def ring_attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, ring: Ring) -> tuple[Tensor, Tensor]:
    """Return the output [b, heads, t, d] and the log-sum-exp [b, heads, t] of attention over the full sequence.

    q: [b, heads, t, d]; k, v: [b, kv_heads, t, d], t the local positions; documents: int64 [b, seq_len].
    """
    if torch.compiler.is_compiling():
        return torch.ops.raytrain_hpc.ring_attend(q, k, v, documents, ring.axis.name, ring.seq_len)  # type: ignore[no-any-return]
    owner = ring.axis.rank
    rotation = ring.start_rotation([k, v], owner)
    out, lse = _attend(q, k, v, ring.get_block_mask(owner, documents)[2])
    # Accumulate in fp32 or wider, in copies: selective checkpointing keeps the tensors that the attention op returned.
    total, lse = out.to(torch.promote_types(out.dtype, torch.float32), copy=True), lse.clone()
    for hop in range(1, ring.axis.size):
        kv, owner = rotation.wait(), ring.get_previous(owner)
        if hop < ring.axis.size - 1:
            rotation = ring.start_rotation(kv, owner)
        queries, keys, mask = ring.get_block_mask(owner, documents)
        block_out, block_lse = _attend(q[:, :, queries], kv[0][:, :, keys], kv[1][:, :, keys], mask)
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
    dq, kv, owner = torch.zeros_like(q), [k, v], ring.axis.rank
    kv_grads = [torch.zeros_like(k), torch.zeros_like(v)]
    kv_rotation = grad_rotation = None
    for hop in range(ring.axis.size):
        if kv_rotation is not None:
            kv, owner = kv_rotation.wait(), ring.get_previous(owner)
        kv_rotation = ring.start_rotation(kv, owner) if hop < ring.axis.size - 1 else None
        queries, keys, mask = ring.get_block_mask(owner, documents)
        block_q, block_out, block_grad_out = (x[:, :, queries] for x in (q, out, grad_out))
        block_k, block_v = (x[:, :, keys] for x in kv)
        block_grads = _attend_backward(block_grad_out, block_q, block_k, block_v, block_out, lse[:, :, queries], mask)
        dq[:, :, queries] += block_grads[0]
        if grad_rotation is not None:
            kv_grads = grad_rotation.wait()
        for grad, block_grad in zip(kv_grads, block_grads[1:], strict=True):
            grad[:, :, keys] += block_grad
        grad_rotation = ring.start_rotation(kv_grads, owner)
    if grad_rotation is not None:
        kv_grads = grad_rotation.wait()
    return dq, kv_grads[0], kv_grads[1]


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
