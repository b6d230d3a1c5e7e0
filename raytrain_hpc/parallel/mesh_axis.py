"""One axis of the mesh as a rank sees it, and the collectives along it that autograd knows how to reverse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass
class Traffic:
    """Elements that this rank has sent along an axis, counted as ring collectives send them."""

    elements: int = 0


@dataclass(frozen=True)
class ExpertMesh:
    """The ranks that have the same experts: those with copies, and the mesh that shards them; None for one rank."""

    replica_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class Axis:
    """`size` ranks along one axis; this one is number `rank`."""

    name: str
    group: dist.ProcessGroup
    rank: int
    size: int
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    def get_local_range(self, total: int, rank: int | None = None) -> range:
        """The part of `total` things that a rank (this one) has: runs in rank order, sizes at most one apart."""
        at = self.rank if rank is None else rank
        return range(at * total // self.size, (at + 1) * total // self.size)

    def all_gather(self, x: Tensor, dim: int, total: int) -> Tensor:
        """All ranks' shares of dimension `dim`, one behind the other. Gradients are summed and shared out again."""
        gathered: Tensor = _AllGather.apply(x, self, dim, total)  # type: ignore[no-untyped-call]
        return gathered

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's share of dimension `dim` of the sum over ranks. Gradients are gathered."""
        scattered: Tensor = _ReduceScatter.apply(x, self, dim)  # type: ignore[no-untyped-call]
        return scattered

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place; no part of any graph."""
        self.traffic.elements += 2 * (self.size - 1) * x.numel() // self.size
        dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The maximum over ranks, in place; no part of any graph."""
        self.traffic.elements += 2 * (self.size - 1) * x.numel() // self.size
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def _all_gather_no_grad(self, x: Tensor, dim: int, total: int) -> Tensor:
        """Shares can be one apart and collectives want them alike: the shorter ones travel with one row of nothing."""
        sizes = [len(self.get_local_range(total, rank)) for rank in range(self.size)]
        sent = _pad(x, dim, max(sizes))
        received = [torch.empty_like(sent) for _ in sizes]
        self.traffic.elements += (self.size - 1) * sent.numel()
        dist.all_gather(received, sent, group=self.group)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(received, sizes, strict=True)], dim)

    def _reduce_scatter_no_grad(self, x: Tensor, dim: int) -> Tensor:
        shares = [self.get_local_range(x.shape[dim], rank) for rank in range(self.size)]
        parts = [x.narrow(dim, share.start, len(share)) for share in shares]
        if x.device.type == "cpu":
            return self._reduce_scatter_by_all_to_all(parts)
        longest = max(len(share) for share in shares)
        sent = [_pad(part, dim, longest) for part in parts]
        received = torch.empty_like(sent[0])
        self.traffic.elements += (self.size - 1) * received.numel()
        dist.reduce_scatter(received, sent, group=self.group)
        return received.narrow(dim, 0, len(shares[self.rank])).contiguous()

    def _reduce_scatter_by_all_to_all(self, parts: list[Tensor]) -> Tensor:
        """Reduce-scatter on gloo, whose own takes two to six times as long as an all-to-all and a sum."""
        mine = parts[self.rank]
        outgoing = [part.numel() for part in parts]
        received = mine.new_empty((self.size, *mine.shape))
        self.traffic.elements += sum(outgoing) - mine.numel()
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_to_all_single(received.view(-1), flat, [mine.numel()] * self.size, outgoing, group=self.group)
        return received.sum(dim=0)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, total: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis._all_gather_no_grad(x, dim, total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis._reduce_scatter_no_grad(gradients[0], ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.total = axis, dim, x.shape[dim]
        return axis._reduce_scatter_no_grad(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis._all_gather_no_grad(gradients[0], ctx.dim, ctx.total), None, None


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    if x.shape[dim] == size:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = size - shape[dim]
    return torch.cat((x, x.new_zeros(shape)), dim)
