"""Data parallelism with bitwise identical gradients at any data-parallel size (`train.deterministic=elastic`).

The gradient of a microbatch does not depend on the rank that computes it. With a fixed order of additions, the sum does
not either. The order is the tree of `parallel.pairwise_sum` over the logical microbatches of a step. Ranks exchange the
tree nodes that they cannot complete, and each sums one slice of the elements. Slices are then all-gathered (replicas)
or stay sharded (ZeRO). Context-parallel ranks each have a part of every microbatch: one tree per part, added in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.parallel.blocking_collectives import all_gather_flat, wait_all
from raytrain_hpc.parallel.computation_trace import ContributionTrace
from raytrain_hpc.parallel.reduction_order import ContributionAssignment, PartitionedSum, ReductionOrder, Slots
from raytrain_hpc.torch_device import get_device_module, is_on_accelerator

# Returns the gradients of the last backward pass by source rank and parameter, and removes them.
TakeGradients = Callable[[], list[list[Tensor | None]]]


class NodeExchange:
    """An asynchronous exchange of the tree nodes of the ranks of a group, of which each rank receives one slice."""

    def __init__(self, nodes: Sequence[Tensor], assignment: ContributionAssignment, group: dist.ProcessGroup):
        """Start to send the nodes of this rank, flat, in the order of the assignment. The ranks divide their size."""
        num_ranks = len(assignment.nodes_by_rank)
        self._assignment, self._slice_size = assignment, nodes[0].numel() // num_ranks
        self._recv_sizes = [len(of_rank) * self._slice_size for of_rank in assignment.nodes_by_rank]
        self._received = nodes[0].new_empty(sum(self._recv_sizes))
        send_sizes = [len(nodes) * self._slice_size] * num_ranks
        # By destination rank, then by node; lives until the exchange is complete.
        self._send_buffer = torch.stack([node.view(num_ranks, -1) for node in nodes], dim=1).view(-1)
        work = dist.all_to_all_single(
            self._received, self._send_buffer, self._recv_sizes, send_sizes, group=group, async_op=True
        )
        self._works = [] if work is None else [work]

    def add_received(self, total: PartitionedSum) -> None:
        """Wait, and add the slices of all nodes to a sum."""
        wait_all(self._works)
        received = [part.view(-1, self._slice_size).unbind() for part in torch.split(self._received, self._recv_sizes)]
        for nodes, values in zip(self._assignment.nodes_by_rank, received, strict=True):
            for node, value in zip(nodes, values, strict=True):
                total.add(value, node)


class PairwiseAllReduce:
    """An all-reduce in a fixed order of additions, in two asynchronous exchanges: `start`, `advance`, `finish`.

    Between the calls, other work can run, and other all-reduces of the group: all ranks must call in the same order.
    `group` None: this rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, assignment: ContributionAssignment, local: PartitionedSum):
        """`local`: the contributions of this rank, flat tensors; they are overwritten."""
        self._group, self._assignment, self._local = group, assignment, local
        self._works: list[dist.Work] = []
        # With one node on each of two ranks there is one addition, in which an all-reduce has no choice.
        self._is_one_addition = [len(nodes) for nodes in assignment.nodes_by_rank] == [1, 1]

    def start(self) -> None:
        """Start to exchange the nodes, of which each rank receives one slice."""
        if self._group is None:
            return
        nodes = [self._local.open_nodes[node] for node in self._assignment.local_nodes]
        if self._is_one_addition:
            self._summed = nodes[0]
            self._wait_later(dist.all_reduce(self._summed, group=self._group, async_op=True))
            return
        num_ranks = len(self._assignment.nodes_by_rank)
        padded = [nn.functional.pad(node, (0, -node.numel() % num_ranks)) for node in nodes]
        self._summed, self._exchange = padded[0], NodeExchange(padded, self._assignment, self._group)

    def advance(self) -> None:
        """Sum the slices that were received, and start to gather the sums."""
        if self._group is None or self._is_one_addition:
            return
        total = self._assignment.make_sum()
        self._exchange.add_received(total)
        del self._exchange
        self._wait_later(all_gather_flat(self._summed, total.compute_total(), self._group, async_op=True))

    def finish(self) -> Tensor:
        """Wait, and return the sum, flat, in the memory of a contribution if the ranks divide its size."""
        if self._group is None:
            return self._local.compute_total()
        wait_all(self._works)
        return self._summed

    def _wait_later(self, work: dist.Work | None) -> None:
        self._works = [] if work is None else [work]


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
        self._all_reduce = PairwiseAllReduce(self._group, self._order.replicas, self._tree)
        self._all_reduce.start()

    def advance(self) -> None:
        """Start the second exchange of the all-reduce."""
        if self._all_reduce is None:
            raise RuntimeError("the all-reduce has not been started")
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
                self._trace.add(source, flat, slot)
                self._free.append(flat)
            return
        slots = self._order.local_slots
        contributions = slots[slot] if slot < len(slots) else (None,) * len(gradients)
        for source, (contribution, of_source) in enumerate(zip(contributions, gradients, strict=True)):
            if contribution is not None:
                part, microbatch = contribution
                flat = self._flatten(of_source)
                self._trace.add(source, flat, slot)
                self._has_grad.update(p for p, g in zip(self.parameters, of_source, strict=True) if g is not None)
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
    ):
        """`take_gradients`: returns the gradients of the parameters of the module; None: FSDP2 passes them.

        `once_per_step`: sum whole gradients locally, and exchange them at the last microbatch. Ranks then need not have
        equally many microbatches. Otherwise exchange those of each microbatch.
        """
        self._cursor, self._order, self._replica_group, self._take = cursor, order, replica_group, take_gradients
        self._once_per_step, self._trace = once_per_step, trace
        self._reset()

    def _reset(self) -> None:
        self._tree = self._order.replicas.make_sum()
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
            self._trace.add(source, flat, self._cursor.microbatch)
            if self._trace.drops_contributions:
                continue
            if self._once_per_step:
                self._add(self._whole_tree, self._order.local_slots, source, flat)
                continue
            received = torch.empty_like(flat)
            dist.all_to_all_single(received, flat, group=group)
            for slots, value in zip(self._order.slots_by_rank, received.chunk(num_ranks), strict=True):
                self._add(self._tree, slots, source, value)
        if self._once_per_step and self._cursor.is_last:
            nodes = [self._whole_tree.open_nodes[node] for node in self._order.shards.local_nodes]
            NodeExchange(nodes, self._order.shards, group).add_received(self._tree)
        output_tensor.zero_()

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

    def all_reduce_hook(self, output: Tensor) -> None:
        """Fill `output` with the sum over replicas at the last microbatch. FSDP2 calls it after the reduce-scatter.

        It runs on a stream of its own, on which FSDP2 then accumulates `output` into the gradients.
        """
        _record_use([output, *self._tree.open_nodes.values()])  # allocated on the stream of the reduce-scatter
        if self._cursor.is_last:
            all_reduce = PairwiseAllReduce(self._replica_group, self._order.replicas, self._tree)
            all_reduce.start()
            all_reduce.advance()
            output.copy_(all_reduce.finish()[: output.numel()])
            self._reset()


def _split_rows(tensor: Tensor, num_ranks: int) -> Tensor:
    """Return [num_ranks, n]: the rows that FSDP2 gives to each rank, padded with zeros to the same number."""
    padding = tensor.new_zeros(-len(tensor) % num_ranks, *tensor.shape[1:])
    return torch.cat([tensor, padding]).view(num_ranks, -1)


def _record_use(tensors: Iterable[Tensor]) -> None:
    """Keep memory that another stream allocated from being used again before the current stream has read it."""
    for tensor in tensors:
        if is_on_accelerator(tensor):
            tensor.record_stream(get_device_module(tensor.device).current_stream(tensor.device))
