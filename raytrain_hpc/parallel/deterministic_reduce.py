"""Data parallelism with bitwise identical gradients at any data-parallel size (`train.deterministic=elastic`).

The gradient of a microbatch does not depend on the rank that computes it. With a fixed order of additions, the sum does
not either. The order is the tree of `parallel.pairwise_sum` over the logical microbatches of a step. Ranks exchange the
tree nodes that they cannot complete, and each sums one slice of the elements. Slices are then all-gathered (replicas)
or stay sharded (ZeRO). Context-parallel ranks each have a part of every microbatch: one tree per part, added in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.parallel.computation_trace import ContributionTrace, SumTrace
from raytrain_hpc.parallel.pairwise_all_reduce import NodeExchange, PairwiseAllReduce, SumAudit, rotate_slices
from raytrain_hpc.parallel.reduction_order import PartitionedSum, ReductionOrder, Slots
from raytrain_hpc.torch_device import get_device_module, is_on_accelerator

# Returns the gradients of the last backward pass by source rank and parameter, and removes them.
TakeGradients = Callable[[], list[list[Tensor | None]]]


class PairwiseBucket:
    """Some parameters and the summation tree of their gradients, flattened, with one flag per parameter.

    Implements `ddp.GradientBucket`.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup | None,
        order: ReductionOrder,
        take_gradients: TakeGradients | None = None,
        *,
        trace: ContributionTrace,
    ):
        """`take_gradients`: returns the gradients; None: they are `grad` of the parameters, of one source."""
        self.parameters = parameters
        self._group, self._order, self._take, self._trace = group, order, take_gradients, trace
        sizes, num_ranks = [parameter.numel() for parameter in parameters], len(order.replicas.nodes_by_rank)
        padding = -(sum(sizes) + len(sizes)) % num_ranks
        self._sizes = [*sizes, len(sizes), padding]  # of a flat tensor: gradients, flags, padding
        self._free: list[Tensor] = []  # flat tensors to be used again
        self._split_gradients: dict[int, list[list[Tensor | None]]] = {}  # of split backward passes, by slot
        self._all_reduce: PairwiseAllReduce | None = None  # of this step, once it has been started
        self._last_sum: Tensor | None = None  # the gradients of the last step, until they are dropped
        self._reset()

    def post_accumulate(self, parameter: Tensor) -> None:
        """Do nothing: gradients are moved at the end of a pass, or before `start`."""

    def post_backward(self, slot: int, *, split: bool) -> None:
        """Move the gradients of one microbatch into the tree; keep those of a split backward pass, to be completed."""
        if split:
            self._split_gradients[slot] = self._take_gradients()
        elif self._all_reduce is None:  # else `start` did it
            self._add(slot, self._take_gradients())

    def post_backward_weight(self, slot: int) -> None:
        """Move the gradients of a microbatch into the tree, after those of weights have been computed."""
        merged = [
            [_add_optional(early, late) for early, late in zip(*gradients, strict=True)]
            for gradients in zip(self._split_gradients.pop(slot), self._take_gradients(), strict=True)
        ]
        self._add(slot, merged)

    def start(self, slot: int | None) -> None:
        """Start the all-reduce. `slot`: of the microbatch whose gradients are not in the tree yet, None: all are."""
        if slot is not None:
            self._add(slot, self._take_gradients())
        audit = None
        if (traces := self._trace.sum_traces) is not None:
            audit = SumAudit(traces.own, traces.other, traces.copy_shift)
        self._all_reduce = PairwiseAllReduce(self._group, self._order.replicas, self._tree, audit)
        self._all_reduce.start()

    def advance(self) -> None:
        """Start the second exchange of the all-reduce."""
        if self._all_reduce is None:
            raise RuntimeError("the all-reduce has not been started")
        self._tree.verify_nodes()
        self._all_reduce.advance()

    def finish(self) -> None:
        """Set the gradients. A parameter without a gradient on all ranks gets None."""
        if self._all_reduce is None:
            raise RuntimeError("the all-reduce has not been started")
        summed = self._all_reduce.finish()
        *grads, has_grad, _ = torch.split(summed, self._sizes)
        for index, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            has_local_grad = parameter in self._has_grad  # saves a synchronization with the device
            parameter.grad = grad.view_as(parameter) if has_local_grad or has_grad[index].item() > 0 else None
        self._free += [value for value in self._tree.open_nodes.values() if value is not summed]
        self._reset()
        self._last_sum = summed

    def _reset(self) -> None:
        self._tree = self._order.replicas.make_sum()
        self._has_grad: set[Tensor] = set()  # parameters with a gradient on this rank in this step
        self._all_reduce = None

    def _take_gradients(self) -> list[list[Tensor | None]]:
        """Return the gradients by source and parameter, and remove them."""
        gradients = [[parameter.grad for parameter in self.parameters]] if self._take is None else self._take()
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def _add(self, slot: int, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Add gradients by source and parameter to the tree, without those of padding microbatches.

        Only trace them if the tracer says that they are to be dropped.
        """
        if self._trace.drops_contributions:
            for source, of_source in enumerate(gradients):
                flat = self._flatten(of_source)
                self._trace.add(source, self._view_gradients(flat, of_source), slot)
                self._free.append(flat)
            return
        slots = self._order.local_slots
        contributions = slots[slot] if slot < len(slots) else (None,) * len(gradients)
        for source, (contribution, of_source) in enumerate(zip(contributions, gradients, strict=True)):
            if contribution is not None:
                part, microbatch = contribution
                flat = self._flatten(of_source)
                self._trace.add(source, self._view_gradients(flat, of_source), slot)
                self._has_grad.update(p for p, g in zip(self.parameters, of_source, strict=True) if g is not None)
                self._trace.check_additions(self._tree)
                self._free += self._tree.add(flat, (part, (0, microbatch)))

    def _flatten(self, gradients: Sequence[Tensor | None]) -> Tensor:
        flat = self._allocate()
        *views, has_grad, _ = torch.split(flat, self._sizes)
        has_grad.fill_(1.0)
        for index, (parameter, view, gradient) in enumerate(zip(self.parameters, views, gradients, strict=True)):
            if gradient is None:
                view.zero_()
                has_grad[index] = 0.0
            else:
                torch.add(gradient, 0.0, out=view.view_as(parameter))
        return flat

    def _view_gradients(self, flat: Tensor, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of a flat tensor by parameter; None for a parameter without one."""
        *views, _, _ = torch.split(flat, self._sizes)
        return [None if gradient is None else view for view, gradient in zip(views, gradients, strict=True)]

    def _allocate(self) -> Tensor:
        if self._last_sum is not None:
            self._free.append(self._last_sum)
            self._last_sum = None
        return self._free.pop() if self._free else self.parameters[0].new_zeros(sum(self._sizes), requires_grad=False)


def _add_optional(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return first if second is None else second
    return first + second


class MicrobatchCursor:
    """The microbatch of the current backward pass, shared by the reduce-scatters of all FSDP2 modules of a rank."""

    def __init__(self) -> None:
        self.microbatch, self.is_last = 0, False


class DeterministicReduceScatter:
    """A custom reduce-scatter and all-reduce hook of one FSDP2 module, in a fixed order of additions."""

    def __init__(
        self,
        cursor: MicrobatchCursor,
        order: ReductionOrder,
        replica_group: dist.ProcessGroup | None,
        take_gradients: TakeGradients | None = None,
        *,
        once_per_step: bool,
        trace: ContributionTrace,
        shapes: Sequence[torch.Size],
    ):
        """`take_gradients`: returns the gradients of the parameters of the module; None: FSDP2 passes them.

        `shapes`: of the whole parameters.

        `once_per_step`: sum whole gradients locally, and exchange them at the last microbatch. Ranks then need not have
        equally many microbatches. Otherwise exchange those of each microbatch.
        """
        self._cursor, self._order, self._replica_group, self._take = cursor, order, replica_group, take_gradients
        self._once_per_step, self._trace, self._shapes = once_per_step, trace, shapes
        self._reset()

    def _reset(self) -> None:
        self._own = _ShardSum(self._order.replicas.make_sum())
        self._other: _ShardSum | None = None  # in audits
        self._whole_tree = self._order.shards.make_sum()  # of whole gradients

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor. Called by FSDP2."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Exchange `input_tensor` [ranks * n], add the local slices to the tree, and zero `output_tensor` [n]."""
        num_ranks = len(self._order.slots_by_rank)
        for source, flat in enumerate(self._list_inputs(input_tensor, num_ranks)):
            self._trace_gradients(source, flat, num_ranks)
            if self._trace.drops_contributions:
                continue
            if self._once_per_step:
                self._trace.check_additions(self._whole_tree)
                self._add(self._whole_tree, self._order.local_slots, source, flat)
                continue
            for shard in self._list_shards():
                received = torch.empty_like(flat)
                dist.all_to_all_single(received, rotate_slices(flat, num_ranks, shard.shift), group=group)
                if shard.trace is not None:
                    shard.trace.add_received(received)
                for slots, value in zip(self._order.slots_by_rank, received.chunk(num_ranks), strict=True):
                    self._add(shard.tree, slots, source, value)
        if self._once_per_step and self._cursor.is_last:
            nodes = [self._whole_tree.open_nodes[node] for node in self._order.shards.local_nodes]
            for shard in self._list_shards():
                NodeExchange(nodes, self._order.shards, group, shard.shift).add_received(shard.tree, shard.trace)
            self._whole_tree.verify_nodes()
        output_tensor.zero_()

    def _list_shards(self) -> list[_ShardSum]:
        """Return the sum of this rank's shard, and in audits that of another rank's, which is only traced."""
        if self._other is None and (traces := self._trace.sum_traces) is not None:
            self._own.trace = traces.own
            self._other = _ShardSum(self._order.replicas.make_sum(), traces.shard_shift, traces.other)
        return [self._own] if self._other is None else [self._own, self._other]

    def _add(self, total: PartitionedSum, slots: Slots, source: int, value: Tensor) -> None:
        """Add the gradient of one source in the current slot of a rank, unless the microbatch is padding."""
        slot = self._cursor.microbatch
        contribution = slots[slot][source] if slot < len(slots) else None
        if contribution is not None:
            part, microbatch = contribution
            total.add(value + 0.0, (part, (0, microbatch)))

    def _list_inputs(self, input_tensor: Tensor, num_ranks: int) -> list[Tensor]:
        """Return the gradients of each source, laid out as FSDP2 does: by rank, then by parameter."""
        if self._take is None:
            return [input_tensor]
        return [
            torch.cat([_split_rows(gradient, num_ranks) for gradient in gradients if gradient is not None], dim=1)
            .to(input_tensor.dtype)
            .view(-1)
            for gradients in self._take()
        ]

    def _trace_gradients(self, source: int, flat: Tensor, num_ranks: int) -> None:
        """Trace the whole gradient of each parameter, without the padding; see `_list_inputs`.

        If some have none, it is unknown which: trace all together.
        """
        widths = [-(-shape[0] // num_ranks) * shape[1:].numel() for shape in self._shapes]
        if sum(widths) * num_ranks != flat.numel():
            self._trace.add_together(source, flat, self._cursor.microbatch)
            return
        by_parameter = zip(torch.split(flat.view(num_ranks, -1), widths, dim=1), self._shapes, strict=True)
        # 0.0 is added as to the gradients that are summed, so that -0.0 has the bits that it has without ZeRO.
        gradients = (rows.reshape(-1)[: shape.numel()] + 0.0 for rows, shape in by_parameter)
        self._trace.add(source, gradients, self._cursor.microbatch)

    def all_reduce_hook(self, output: Tensor) -> None:
        """Fill `output` with the sum over replicas at the last microbatch. FSDP2 calls it after the reduce-scatter.

        It runs on a stream of its own, on which FSDP2 then accumulates `output` into the gradients.
        """
        shards = [self._own] if self._other is None else [self._other, self._own]
        for shard in shards:  # their tensors were allocated on the stream of the reduce-scatter
            _record_use([output, *shard.tree.open_nodes.values()])
        if self._cursor.is_last:
            for shard in shards:  # this rank's last
                audit = None
                if shard.trace is not None:
                    where = ", over copies" if self._replica_group is not None else ""
                    audit = SumAudit(SumTrace(shard.trace.trace, shard.trace.label + where))
                all_reduce = PairwiseAllReduce(self._replica_group, self._order.replicas, shard.tree, audit)
                all_reduce.start()
                all_reduce.advance()
                total = all_reduce.finish()
            output.copy_(total[: output.numel()])
            self._reset()


@dataclass
class _ShardSum:
    """The sum of the gradients of one shard: this rank's, or that of the rank `shift` further."""

    tree: PartitionedSum
    shift: int = 0
    trace: SumTrace | None = None


def _split_rows(tensor: Tensor, num_ranks: int) -> Tensor:
    """Return [num_ranks, n]: the rows that FSDP2 gives to each rank, padded with zeros to the same number."""
    padding = tensor.new_zeros(-len(tensor) % num_ranks, *tensor.shape[1:])
    return torch.cat([tensor, padding]).view(num_ranks, -1)


def _record_use(tensors: Iterable[Tensor]) -> None:
    """Keep memory that another stream allocated from being used again before the current stream has read it."""
    for tensor in tensors:
        if is_on_accelerator(tensor):
            tensor.record_stream(get_device_module(tensor.device).current_stream(tensor.device))
