"""Expert parallelism: every rank of an axis holds some experts, and positions travel to those that they chose.

Two exchanges of all with all a layer (Lepikhin et al. 2020, arXiv 2006.16668), of exactly the rows that were routed:
nothing is padded, nothing dropped, and an expert may get none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.moe import Experts, MixtureOfExperts
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.shard_spec import Cut, Part


class Elsewhere:
    """Experts on several ranks, instead of `experts_here`."""

    def __init__(self, axis: Axis, experts: int):
        self._axis = axis
        self._of_rank = [axis.share(experts, rank) for rank in range(axis.size)]

    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """What all experts make of rows [n, hidden_size] in their order, counts int64 [experts] of each."""
        gathered = [torch.empty_like(counts) for _ in self._of_rank]
        dist.all_gather(gathered, counts, group=self._axis.group)
        mine = self._of_rank[self._axis.rank]
        arriving = [other[mine.start : mine.stop].tolist() for other in gathered]  # by rank they come from, by expert
        wanted = counts.tolist()
        leaving = [sum(wanted[span.start : span.stop]) for span in self._of_rank]
        coming = [sum(of_rank) for of_rank in arriving]
        received = _exchange(rows, self._axis, leaving, coming)
        by_expert = _reorder(received, arriving)
        sizes = [sum(of_rank[number] for of_rank in arriving) for number in range(len(mine))]
        made = experts(by_expert, sizes)
        by_rank = _reorder(made, [[of_rank[number] for of_rank in arriving] for number in range(len(mine))])
        return _exchange(by_rank, self._axis, coming, leaving)


def _reorder(rows: Tensor, sizes: list[list[int]]) -> Tensor:
    """Runs of rows in the order (outer, inner) put in the order (inner, outer); sizes[outer][inner] of each."""
    runs = torch.split(rows, [size for inner in sizes for size in inner])
    inner = len(sizes[0]) if sizes else 0
    return torch.cat([runs[o * inner + i] for i in range(inner) for o in range(len(sizes))]) if runs else rows


def _exchange(rows: Tensor, axis: Axis, leaving: list[int], coming: list[int]) -> Tensor:
    exchanged: Tensor = _AllToAll.apply(rows, axis, leaving, coming)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, leaving: list[int], coming: list[int]) -> Tensor:
        ctx.axis, ctx.leaving, ctx.coming = axis, leaving, coming
        return _sent(rows, axis, leaving, coming)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _sent(gradients[0], ctx.axis, ctx.coming, ctx.leaving), None, None, None


def _sent(rows: Tensor, axis: Axis, leaving: list[int], coming: list[int]) -> Tensor:
    received = rows.new_empty((sum(coming), rows.shape[1]))
    axis.traffic.elements += (sum(leaving) - leaving[axis.rank]) * rows.shape[1]
    dist.all_to_all_single(received, rows.contiguous(), coming, leaving, group=axis.group)
    return received


def expert_parameters(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of all experts in these modules, by name."""
    named = [(name, part) for module in modules for name, part in module.named_modules() if isinstance(part, Experts)]
    return {f"{name}.{own}": parameter for name, part in named for own, parameter in part.named_parameters()}


def place_experts(decoder: Decoder, axes: Mapping[str, Axis], cuts: dict[str, Cut]) -> None:
    """Leave this rank its experts of a decoder on the meta device, and its channels of each; adds to `cuts`."""
    shape, ep, tp = decoder.shape, axes.get("ep"), axes.get("tp")
    mine = range(shape.num_experts) if ep is None else ep.share(shape.num_experts)
    channels = range(shape.ffn_size) if tp is None else tp.share(shape.ffn_size)
    for number, block in decoder.blocks().items():
        mixture = block.mlp
        if not isinstance(mixture, MixtureOfExperts):
            continue
        dtype = mixture.experts.up.dtype
        with torch.device("meta"):
            mixture.experts = Experts(shape, len(mine), len(channels)).to(dtype)
        if ep is not None:
            mixture.places = Elsewhere(ep, shape.num_experts)
        for name, parameter in mixture.experts.named_parameters():
            canonical = f"layers.{number}.mlp.experts.{name}"
            size, corner = (shape.ffn_size, shape.hidden_size), (channels.start, 0)
            if name == "down":
                size, corner = size[::-1], corner[::-1]
            region = Box((mine.start, *corner), tuple(parameter.shape))
            part = Part(region, Box.whole(parameter.shape))
            cuts[canonical] = Cut(canonical, (shape.num_experts, *size), (part,))
