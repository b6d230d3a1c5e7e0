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
from raytrain_hpc.state.shard_spec import ShardSpec, SliceMapping


class ExpertParallelDispatcher:
    """Experts on several ranks, instead of `experts_here`."""

    def __init__(self, axis: Axis, num_experts: int):
        self._axis = axis
        self._expert_ranges = [axis.get_local_range(num_experts, rank) for rank in range(axis.size)]

    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """What all experts make of rows [n, hidden_size] in their order, counts int64 [experts] of each."""
        gathered = [torch.empty_like(counts) for _ in self._expert_ranges]
        dist.all_gather(gathered, counts, group=self._axis.group)
        mine = self._expert_ranges[self._axis.rank]
        arriving = [other[mine.start : mine.stop].tolist() for other in gathered]  # by rank they come from, by expert
        wanted = counts.tolist()
        leaving = [sum(wanted[span.start : span.stop]) for span in self._expert_ranges]
        coming = [sum(of_rank) for of_rank in arriving]
        received = _all_to_all(rows, self._axis, leaving, coming)
        by_expert = _reorder(received, arriving)
        sizes = [sum(of_rank[number] for of_rank in arriving) for number in range(len(mine))]
        made = experts(by_expert, sizes)
        by_rank = _reorder(made, [[of_rank[number] for of_rank in arriving] for number in range(len(mine))])
        return _all_to_all(by_rank, self._axis, coming, leaving)


def _reorder(rows: Tensor, sizes: list[list[int]]) -> Tensor:
    """Runs of rows in the order (outer, inner) put in the order (inner, outer); sizes[outer][inner] of each."""
    runs = torch.split(rows, [size for inner in sizes for size in inner])
    inner = len(sizes[0]) if sizes else 0
    return torch.cat([runs[o * inner + i] for i in range(inner) for o in range(len(sizes))]) if runs else rows


def _all_to_all(rows: Tensor, axis: Axis, send_counts: list[int], recv_counts: list[int]) -> Tensor:
    exchanged: Tensor = _AllToAll.apply(rows, axis, send_counts, recv_counts)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, send_counts: list[int], recv_counts: list[int]) -> Tensor:
        ctx.axis, ctx.leaving, ctx.coming = axis, send_counts, recv_counts
        return _all_to_all_no_grad(rows, axis, send_counts, recv_counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all_no_grad(gradients[0], ctx.axis, ctx.coming, ctx.leaving), None, None, None


def _all_to_all_no_grad(rows: Tensor, axis: Axis, send_counts: list[int], recv_counts: list[int]) -> Tensor:
    received = rows.new_empty((sum(recv_counts), rows.shape[1]))
    axis.traffic.elements += (sum(send_counts) - send_counts[axis.rank]) * rows.shape[1]
    dist.all_to_all_single(received, rows.contiguous(), recv_counts, send_counts, group=axis.group)
    return received


def get_expert_parameters(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of all experts in these modules, by name."""
    named = [(name, part) for module in modules for name, part in module.named_modules() if isinstance(part, Experts)]
    return {f"{name}.{own}": parameter for name, part in named for own, parameter in part.named_parameters()}


def apply_expert_parallel(decoder: Decoder, axes: Mapping[str, Axis], shard_specs: dict[str, ShardSpec]) -> None:
    """Leave this rank its experts of a decoder on the meta device, and its channels of each; adds to `cuts`."""
    shape, ep, tp = decoder.spec, axes.get("ep"), axes.get("tp")
    mine = range(shape.num_experts) if ep is None else ep.get_local_range(shape.num_experts)
    channels = range(shape.ffn_size) if tp is None else tp.get_local_range(shape.ffn_size)
    for number, block in decoder.blocks().items():
        mixture = block.mlp
        if not isinstance(mixture, MixtureOfExperts):
            continue
        dtype = mixture.experts.up.dtype
        with torch.device("meta"):
            mixture.experts = Experts(shape, len(mine), len(channels)).to(dtype)
        if ep is not None:
            mixture.dispatcher = ExpertParallelDispatcher(ep, shape.num_experts)
        for name, parameter in mixture.experts.named_parameters():
            canonical = f"layers.{number}.mlp.experts.{name}"
            size, corner = (shape.ffn_size, shape.hidden_size), (channels.start, 0)
            if name == "down":
                size, corner = size[::-1], corner[::-1]
            region = Box((mine.start, *corner), tuple(parameter.shape))
            part = SliceMapping(region, Box.from_shape(parameter.shape))
            shard_specs[canonical] = ShardSpec(canonical, (shape.num_experts, *size), (part,))
