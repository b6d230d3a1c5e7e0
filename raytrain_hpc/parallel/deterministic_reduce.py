"""Data parallelism with bitwise identical gradients at any data-parallel size (`train.deterministic=elastic`).

The gradient of a microbatch does not depend on the rank that computes it. With a fixed order of additions, the sum does
not either. The order is the tree of `parallel.pairwise_sum` over the logical microbatches of a step. Ranks exchange the
tree nodes that they cannot complete, and each sums one slice of the elements. Slices are then all-gathered (replicas)
or stay sharded (ZeRO). Context-parallel ranks each have a part of every microbatch: one tree per part, added in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.parallel.blocking_collectives import all_gather_flat
from raytrain_hpc.parallel.ddp import split_into_buckets
from raytrain_hpc.parallel.pairwise_sum import Node, PairwiseSum, list_open_nodes
from raytrain_hpc.planner.layout import Batching, Layout


@dataclass(frozen=True)
class MicrobatchAssignment:
    """The microbatches that each rank of a group computes.

    `num_microbatches`: of a step, over all ranks. `part_by_rank`: the part of its microbatches (the context-parallel
    coordinate) that a rank computes.
    """

    num_microbatches: int
    microbatches_by_rank: tuple[tuple[int, ...], ...]
    part_by_rank: tuple[int, ...]
    rank: int  # this rank

    def list_nodes(self) -> list[list[Node]]:
        """Return the tree nodes that each rank sends."""
        return [list_open_nodes(microbatches, self.num_microbatches) for microbatches in self.microbatches_by_rank]

    def sum_nodes(self, received: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the sum over the group. `received`: values by rank, in the order of `list_nodes`."""
        total: Tensor | None = None
        for part in range(max(self.part_by_rank) + 1):
            tree = PairwiseSum(self.num_microbatches)
            for nodes, values, rank_part in zip(self.list_nodes(), received, self.part_by_rank, strict=True):
                for node, value in zip(nodes, values, strict=True) if rank_part == part else ():
                    tree.add(value.clone(), node)
            if tree.total is None:
                raise RuntimeError("the ranks of a group do not compute all microbatches of the step")
            total = tree.total if total is None else total.add_(tree.total)
        if total is None:
            raise RuntimeError("the group has no ranks")
        return total.add_(0.0)  # turn -0.0 into 0.0: its sign depends on how many zeros were added


def all_reduce_pairwise(
    group: dist.ProcessGroup | None, assignment: MicrobatchAssignment, local: PairwiseSum, out: Tensor
) -> None:
    """Fill `out` [n] with the sum of the partial sums of all ranks of the group. `group` None: this rank alone."""
    if group is None:
        torch.add(local.open_nodes[assignment.list_nodes()[0][0]], 0.0, out=out)
        return
    num_ranks, num_elements = len(assignment.microbatches_by_rank), out.numel()
    slice_size = -(-num_elements // num_ranks)  # elements that each rank sums
    node_counts = [len(nodes) for nodes in assignment.list_nodes()]
    send_buffer = torch.stack([local.open_nodes[node] for node in assignment.list_nodes()[assignment.rank]])
    send_buffer = (
        nn.functional.pad(send_buffer, (0, slice_size * num_ranks - num_elements))
        .view(-1, num_ranks, slice_size)
        .transpose(0, 1)
        .contiguous()
    )
    received = send_buffer.new_empty(sum(node_counts) * slice_size)
    recv_sizes = [count * slice_size for count in node_counts]
    dist.all_to_all_single(
        received, send_buffer.view(-1), recv_sizes, [send_buffer[0].numel()] * num_ranks, group=group
    )
    values_by_rank = [values.view(-1, slice_size).unbind() for values in torch.split(received, recv_sizes)]
    gathered = received.new_empty(num_ranks * slice_size)
    all_gather_flat(gathered, assignment.sum_nodes(values_by_rank), group)
    out.copy_(gathered[:num_elements])


class DeterministicDDPSync:
    """Gradient synchronization over replicas in a fixed order of additions.

    A parameter that gets no gradient on any rank keeps `grad` None.
    """

    def __init__(
        self,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        assignment: MicrobatchAssignment,
        bucket_mib: int,
    ):
        """`parameters`: by pipeline stage, then by name. `group` None: this rank alone."""
        self._group, self._assignment = group, assignment
        self._buckets = {
            stage: [
                _Bucket(bucket_parameters, assignment.num_microbatches)
                for bucket_parameters in split_into_buckets(list(named.values()), bucket_mib * 2**20)
            ]
            for stage, named in parameters.items()
        }

    @contextmanager
    def backward_context(self, stage: int, microbatch: int, *, is_last: bool, split: bool = False) -> Iterator[None]:
        """Run one backward pass, then move its gradients into the tree."""
        yield
        microbatches = self._assignment.microbatches_by_rank[self._assignment.rank]
        for bucket in self._buckets[stage]:
            bucket.add_grads(microbatches[microbatch] if microbatch < len(microbatches) else None)

    def post_backward_weight(self, stage: int, *, is_last: bool) -> None:
        """Do nothing: schedules that split backward passes are refused with `train.deterministic=elastic`."""

    def finish_grad_sync(self) -> None:
        """Sum over the group and set the gradients. Call after the last backward pass of a step."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.finish(self._group, self._assignment)

    def free_gathered_weights(self) -> None:
        """Do nothing: every replica has whole weights."""


class _Bucket:
    """Some parameters and the summation tree of their gradients, flattened, with one flag per parameter."""

    def __init__(self, parameters: list[nn.Parameter], num_microbatches: int):
        self._parameters, self._num_microbatches = parameters, num_microbatches
        self._tree = PairwiseSum(num_microbatches)

    def add_grads(self, microbatch: int | None) -> None:
        """Move the gradients of one microbatch into the tree; drop those of a padding microbatch (None)."""
        if microbatch is not None:
            flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            has_grad = self._parameters[0].new_tensor([float(p.grad is not None) for p in self._parameters])
            self._tree.add(torch.cat([*(grad.reshape(-1) for grad in flat), has_grad]), (0, microbatch))
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self, group: dist.ProcessGroup | None, assignment: MicrobatchAssignment) -> None:
        """Set the gradients and reset the tree."""
        sizes = [parameter.numel() for parameter in self._parameters]
        summed = self._parameters[0].new_empty(sum(sizes) + len(sizes), requires_grad=False)
        all_reduce_pairwise(group, assignment, self._tree, summed)
        self._tree = PairwiseSum(self._num_microbatches)
        *grads, has_grad = torch.split(summed, [*sizes, len(sizes)])
        for parameter, grad, flag in zip(self._parameters, grads, has_grad.tolist(), strict=True):
            parameter.grad = grad.view_as(parameter) if flag > 0 else None


class MicrobatchCursor:
    """The microbatch of the current backward pass, shared by the reduce-scatters of all FSDP2 modules of a rank."""

    def __init__(self) -> None:
        self.microbatch, self.is_last = 0, False


class DeterministicReduceScatter:
    """A custom reduce-scatter and all-reduce hook of one FSDP2 module, in a fixed order of additions."""

    def __init__(
        self,
        cursor: MicrobatchCursor,
        shards: MicrobatchAssignment,
        replicas: MicrobatchAssignment,
        replica_group: dist.ProcessGroup | None,
    ):
        """`shards`: of the ranks over which state is sharded. `replicas`: of the ranks that hold the same shard."""
        self._cursor, self._shards, self._replicas, self._replica_group = cursor, shards, replicas, replica_group
        self._tree = PairwiseSum(shards.num_microbatches)

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
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for microbatches, value in zip(
            self._shards.microbatches_by_rank, received.chunk(len(self._shards.microbatches_by_rank)), strict=True
        ):
            if self._cursor.microbatch < len(microbatches):
                self._tree.add(value.clone(), (0, microbatches[self._cursor.microbatch]))
        output_tensor.zero_()

    def all_reduce_hook(self, output: Tensor) -> None:
        """Fill `output` with the sum over replicas at the last microbatch. FSDP2 calls it after the reduce-scatter.

        It runs on a stream of its own, on which FSDP2 then accumulates `output` into the gradients.
        """
        _record_use([output, *self._tree.open_nodes.values()])  # allocated on the stream of the reduce-scatter
        if self._cursor.is_last:
            all_reduce_pairwise(self._replica_group, self._replicas, self._tree, output)
            self._tree = PairwiseSum(self._shards.num_microbatches)


def _record_use(tensors: Iterable[Tensor]) -> None:
    """Keep memory that another stream allocated from being used again before the current stream has read it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@dataclass(frozen=True)
class ReductionOrder:
    """Microbatch assignments of the ranks that hold the same state, and of the ranks over which ZeRO shards it."""

    replicas: MicrobatchAssignment
    shards: MicrobatchAssignment


def make_reduction_order(layout: Layout, batching: Batching, rank: int) -> ReductionOrder:
    """Return the reduction order of the groups of `rank`."""
    coordinates, microbatches_by_dp_rank = (
        layout.get_coordinates(rank),
        [tuple(microbatches) for microbatches in batching.split_by_rank(layout.dp_size)],
    )
    shards = [
        microbatches_by_dp_rank[coordinates["dp_replicate"] * layout.dp_shard + shard]
        for shard in range(layout.dp_shard)
    ]
    microbatches_by_replica = [
        tuple(
            sorted(
                microbatch
                for microbatches in microbatches_by_dp_rank[first : first + layout.dp_shard]
                for microbatch in microbatches
            )
        )
        for first in range(0, len(microbatches_by_dp_rank), layout.dp_shard)
    ]
    replicas = [(microbatches, part) for microbatches in microbatches_by_replica for part in range(layout.cp)]
    replica_rank = coordinates["dp_replicate"] * layout.cp + coordinates["cp"]
    return ReductionOrder(
        MicrobatchAssignment(
            batching.count,
            tuple(microbatches for microbatches, _ in replicas),
            tuple(part for _, part in replicas),
            replica_rank,
        ),
        MicrobatchAssignment(batching.count, tuple(shards), (0,) * layout.dp_shard, coordinates["dp_shard"]),
    )
