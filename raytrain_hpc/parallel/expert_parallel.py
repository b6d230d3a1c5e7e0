"""Expert parallelism: experts are sharded over ranks, and positions are sent to the experts they are routed to.

Two all-to-alls per layer (Lepikhin et al. 2020, arXiv 2006.16668), of exactly the routed rows: no padding, no capacity
limit, no dropped positions. An expert may get no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.config.training_config import computes_in_bf16
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.grouped_linear import ALIGNMENT_BYTES
from raytrain_hpc.model.moe import Experts, MixtureOfExperts, invert_order, reorder_rows
from raytrain_hpc.parallel.computation_trace import ComputationTracer, EntryKind
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.shard_spec import ShardSpec, SliceMapping
from raytrain_hpc.torch_device import has_grouped_mm


class ExpertParallelDispatcher:
    """Dispatcher to experts on several ranks. Rows travel while other code runs between `start` and `finish`."""

    def __init__(self, axis: Axis, num_experts: int, *, by_source: bool, tracer: ComputationTracer):
        """Create a dispatcher. `by_source`: multiply the positions of each rank separately, see `source_gradients`."""
        self._axis, self._by_source, self._tracer = axis, by_source, tracer
        self._expert_ranges = [axis.get_local_range(num_experts, rank) for rank in range(axis.size)]

    def start(self, rows: Tensor, counts: Tensor) -> _Pending:
        """Exchange the counts of all ranks, for which the host waits once, and start to exchange rows."""
        local = self._expert_ranges[self._axis.rank]
        counts_by_rank = self._axis.all_gather_stacked(counts)
        host_counts_by_rank = counts_by_rank.cpu()
        own_counts = host_counts_by_rank[self._axis.rank].tolist()
        send_sizes = [sum(own_counts[experts.start : experts.stop]) for experts in self._expert_ranges]
        host_counts = host_counts_by_rank[:, local.start : local.stop]
        exchange = _Exchange(self._axis, send_sizes, host_counts.sum(dim=1).tolist(), self._tracer)
        received: Tensor = _Start.apply(rows, exchange)  # type: ignore[no-untyped-call]
        return _Pending(received, exchange, counts_by_rank[:, local.start : local.stop], host_counts)

    def finish(self, experts: Experts, pending: _Pending) -> Tensor:
        """Return the outputs [n, hidden_size] of all experts for the rows of `start`."""
        exchange = pending.exchange
        received: Tensor = _Finish.apply(pending.received, exchange)  # type: ignore[no-untyped-call]
        sizes = pending.counts if experts.use_kernel else pending.host_counts
        if self._by_source:
            outputs = experts(received, sizes.flatten())
        else:
            order, inverse_order = _sort_by_expert(pending.counts, len(received))
            outputs = experts(reorder_rows(received, order, inverse_order), sizes.sum(dim=0))
            outputs = reorder_rows(outputs, inverse_order, order)
        back = _Exchange(self._axis, exchange.recv_sizes, exchange.send_sizes, self._tracer, is_return=True)
        returned: Tensor = _Finish.apply(_Start.apply(outputs, back), back)  # type: ignore[no-untyped-call]
        return returned


def _sort_by_expert(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts rows by expert and then by rank, and its inverse.

    counts: int64 [num_ranks, num_experts], of rows that are sorted by rank and then by expert.
    """
    num_ranks, num_experts = counts.shape
    experts = torch.arange(num_experts, device=counts.device).repeat(num_ranks)
    order = experts.repeat_interleave(counts.flatten(), output_size=num_rows).sort(stable=True).indices
    return order, invert_order(order)


class _Exchange:
    """An all-to-all of rows, and that of their gradients in the other direction. One runs at a time.

    `is_return`: from experts to the ranks whose positions the rows are.
    """

    def __init__(
        self,
        axis: Axis,
        send_sizes: list[int],
        recv_sizes: list[int],
        tracer: ComputationTracer,
        *,
        is_return: bool = False,
    ):
        self._axis, self.send_sizes, self.recv_sizes = axis, send_sizes, recv_sizes
        self._tracer, self._is_return, self._is_backward = tracer, is_return, False
        self._running: tuple[Tensor, dist.Work | None] | None = None

    def start(self, rows: Tensor, *, backward: bool = False) -> Tensor:
        """Start to send rows, or gradients back. Return the tensor that the exchange fills."""
        self._is_backward = backward
        recv_sizes, send_sizes = (self.send_sizes, self.recv_sizes) if backward else (self.recv_sizes, self.send_sizes)
        self._trace("sent", rows, send_sizes, by_experts=self._is_return != backward)
        self._running = self._axis.start_all_to_all(rows, recv_sizes, send_sizes)
        return self._running[0]

    def finish(self) -> Tensor:
        """Wait until the tensor is filled and return it. On a GPU, only its stream waits."""
        if self._running is None:
            raise RuntimeError("no exchange has started")
        (received, work), self._running = self._running, None
        if work is not None:
            work.wait()
        sizes = self.send_sizes if self._is_backward else self.recv_sizes
        self._trace("received", received, sizes, by_experts=self._is_return == self._is_backward)
        return received

    def _trace(self, kind: EntryKind, rows: Tensor, sizes: list[int], *, by_experts: bool) -> None:
        """Trace rows of this rank's microbatch, or those that its experts get from and send to each rank."""
        label = "gradients of rows of experts" if self._is_backward else "rows of experts"
        if not by_experts:
            self._tracer.add(kind, label, rows)
            return
        for source, of_source in enumerate(torch.split(rows, sizes)):
            self._tracer.add_of_experts(kind, label, source, of_source)


class _Start(torch.autograd.Function):
    """Start an exchange. The backward pass waits for the exchange of gradients, which that of `_Finish` starts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.finish(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(gradients[0], backward=True)
        return gradients[0], None  # in place of those under way, which can have another number of rows


class _Pending(NamedTuple):
    """Rows that are on their way to their experts."""

    received: Tensor  # [n, hidden_size], filled when the exchange ends; sorted by rank and then by expert
    exchange: _Exchange
    counts: Tensor  # int64 [num_ranks, num_local_experts]: rows from each rank for each expert
    host_counts: Tensor  # the same in host memory


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


def apply_expert_parallel(
    decoder: Decoder, axes: Mapping[str, Axis], *, is_elastic: bool, tracer: ComputationTracer
) -> dict[str, ShardSpec]:
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
            mixture.dispatcher = ExpertParallelDispatcher(ep, spec.num_experts, by_source=is_elastic, tracer=tracer)
        for name, parameter in mixture.experts.named_parameters():
            canonical_name = f"layers.{layer}.mlp.experts.{name}"
            size, offset = (spec.ffn_size, spec.hidden_size), (channels.start, 0)
            if name == "down":
                size, offset = size[::-1], offset[::-1]
            region = Box((local_experts.start, *offset), tuple(parameter.shape))
            mapping = SliceMapping(region, Box.from_shape(parameter.shape))
            shard_specs[canonical_name] = ShardSpec(canonical_name, (spec.num_experts, *size), (mapping,))
    return shard_specs


def apply_grouped_kernel(decoder: Decoder, dtype: str, device: torch.device) -> None:
    """Multiply the rows of all experts in one kernel, in place, where the device has one. `dtype`: train.dtype."""
    if not computes_in_bf16(dtype) or not has_grouped_mm(device):
        return
    for experts in decoder.modules():
        if isinstance(experts, Experts):
            sizes = experts.up.shape[1:]
            experts.use_kernel = all(size * torch.bfloat16.itemsize % ALIGNMENT_BYTES == 0 for size in sizes)
