"""Expert parallelism: experts are sharded over ranks, and positions are sent to the experts they are routed to.

Two all-to-alls per layer (Lepikhin et al. 2020, arXiv 2006.16668), of exactly the routed rows: no padding, no capacity
limit, no dropped positions. An expert may get no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.moe import Experts, MixtureOfExperts, run_local_experts
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.shard_spec import ShardSpec, SliceMapping


class ExpertParallelDispatcher:
    """Dispatcher to experts on several ranks. Replaces `run_local_experts`."""

    def __init__(self, axis: Axis, num_experts: int, *, by_source: bool):
        """Create a dispatcher. `by_source`: multiply the positions of each rank separately, see `source_gradients`."""
        self._axis, self._by_source = axis, by_source
        self._expert_ranges = [axis.get_local_range(num_experts, rank) for rank in range(axis.size)]

    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs [n, hidden_size] of all experts.

        rows: [n, hidden_size], sorted by expert; counts: int64 [num_experts], rows per expert.
        """
        local_experts = self._expert_ranges[self._axis.rank]
        counts_by_rank = self._axis.all_gather_stacked(counts)
        recv_counts_by_rank = counts_by_rank[:, local_experts.start : local_experts.stop].tolist()
        send_counts = counts.tolist()
        send_sizes = [
            sum(send_counts[experts_of_rank.start : experts_of_rank.stop]) for experts_of_rank in self._expert_ranges
        ]
        recv_sizes = [sum(rank_counts) for rank_counts in recv_counts_by_rank]
        received = _all_to_all(rows, self._axis, send_sizes, recv_sizes)
        if self._by_source:
            outputs = experts(received, [size for rank_counts in recv_counts_by_rank for size in rank_counts])
            return _all_to_all(outputs, self._axis, recv_sizes, send_sizes)
        by_expert = _reorder(received, recv_counts_by_rank)
        sizes = [
            sum(rank_counts[expert] for rank_counts in recv_counts_by_rank) for expert in range(len(local_experts))
        ]
        outputs = experts(by_expert, sizes)
        by_rank = _reorder(
            outputs,
            [[rank_counts[expert] for rank_counts in recv_counts_by_rank] for expert in range(len(local_experts))],
        )
        return _all_to_all(by_rank, self._axis, recv_sizes, send_sizes)


def skip_exchanges(modules: Iterable[nn.Module], num_ranks: int) -> None:
    """Let the local experts of each mixture process the rows of this rank, without the other ranks: for a warm-up.

    How many rows a rank receives is known from its peers only. Call after `parallelize`. `num_ranks`: of the "ep" axis.
    """
    for module in modules:
        for mixture in module.modules():
            if isinstance(mixture, MixtureOfExperts) and mixture.dispatcher is not run_local_experts:
                dispatch = partial(_run_first_expert, num_ranks)
                mixture.dispatcher = torch.compiler.disable(dispatch)  # type: ignore[no-untyped-call]


def _run_first_expert(num_ranks: int, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the outputs [n, hidden_size] of the first local expert for all rows [n, hidden_size]."""
    num_groups = len(experts.up) * (num_ranks if experts.activates_groups else 1)  # elastic: by source rank too
    outputs: Tensor = experts(rows, [len(rows)] + [0] * (num_groups - 1))
    return outputs


def _reorder(rows: Tensor, sizes: list[list[int]]) -> Tensor:
    """Reorder groups of rows from (outer, inner) to (inner, outer) order; sizes[outer][inner]: rows per group."""
    groups = torch.split(rows, [size for inner in sizes for size in inner])
    inner = len(sizes[0]) if sizes else 0
    return torch.cat([groups[o * inner + i] for i in range(inner) for o in range(len(sizes))]) if groups else rows


def _all_to_all(rows: Tensor, axis: Axis, send_counts: list[int], recv_counts: list[int]) -> Tensor:
    exchanged: Tensor = _AllToAll.apply(rows, axis, send_counts, recv_counts)  # type: ignore[no-untyped-call]
    return exchanged


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis, send_counts: list[int], recv_counts: list[int]) -> Tensor:
        ctx.axis, ctx.send_counts, ctx.recv_counts = axis, send_counts, recv_counts
        return axis.all_to_all(rows, recv_counts, send_counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_to_all(gradients[0], ctx.send_counts, ctx.recv_counts), None, None, None


def get_expert_parameters(modules: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of all experts in `modules`, by name."""
    named_experts = [
        (name, experts)
        for module in modules
        for name, experts in module.named_modules()
        if isinstance(experts, Experts)
    ]
    return {
        f"{name}.{parameter_name}": parameter
        for name, experts in named_experts
        for parameter_name, parameter in experts.named_parameters()
    }


def apply_expert_parallel(decoder: Decoder, axes: Mapping[str, Axis], *, is_elastic: bool) -> dict[str, ShardSpec]:
    """Shard the experts of a decoder on the meta device, in place, and return their shard specs by parameter name.

    The "ep" axis shards the experts, the "tp" axis the channels of each expert. Does nothing without either axis.
    `is_elastic`: the gradients of a microbatch get the same bits whatever other positions its experts process.
    """
    spec, ep, tp = decoder.spec, axes.get("ep"), axes.get("tp")
    shard_specs: dict[str, ShardSpec] = {}
    local_experts = range(spec.num_experts) if ep is None else ep.get_local_range(spec.num_experts)
    channels = range(spec.ffn_size) if tp is None else tp.get_local_range(spec.ffn_size)
    for layer, block in decoder.blocks().items():
        mixture = block.mlp
        if not isinstance(mixture, MixtureOfExperts):
            continue
        if ep is not None or tp is not None:
            dtype = mixture.experts.up.dtype
            with torch.device("meta"):
                mixture.experts = Experts(spec, len(local_experts), len(channels)).to(dtype)
        mixture.experts.activates_groups = is_elastic
        if ep is None and tp is None:
            continue
        if ep is not None:
            mixture.dispatcher = ExpertParallelDispatcher(ep, spec.num_experts, by_source=is_elastic)
        for name, parameter in mixture.experts.named_parameters():
            canonical_name = f"layers.{layer}.mlp.experts.{name}"
            size, offset = (spec.ffn_size, spec.hidden_size), (channels.start, 0)
            if name == "down":
                size, offset = size[::-1], offset[::-1]
            region = Box((local_experts.start, *offset), tuple(parameter.shape))
            mapping = SliceMapping(region, Box.from_shape(parameter.shape))
            shard_specs[canonical_name] = ShardSpec(canonical_name, (spec.num_experts, *size), (mapping,))
    return shard_specs
