"""Data parallelism whose gradients are the same bits at every degree (`train.deterministic=elastic`).

A microbatch's gradient does not depend on who computes it, so only the order of additions must not either: it is that
of `parallel.pairwise`, over the step's logical microbatches. Ranks exchange the nodes that they cannot complete, each
adds up one part of the elements, and the parts are gathered again (replicas) or stay where they are (ZeRO).
Context-parallel peers each have a part of every microbatch: a tree each, which are added in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """Who of a group computes what: the microbatches of each member, out of `count`, and which part of them."""

    num_microbatches: int
    microbatches_by_rank: tuple[tuple[int, ...], ...]
    part_by_rank: tuple[int, ...]
    rank: int  # this rank

    def list_nodes(self) -> list[list[Node]]:
        """What each member hands on."""
        return [list_open_nodes(run, self.num_microbatches) for run in self.microbatches_by_rank]

    def sum_nodes(self, received: Sequence[Sequence[Tensor]]) -> Tensor:
        """The sum of the members' nodes, as `nodes` lists them."""
        total: Tensor | None = None
        for part in range(max(self.part_by_rank) + 1):
            tree = PairwiseSum(self.num_microbatches)
            for nodes, values, of in zip(self.list_nodes(), received, self.part_by_rank, strict=True):
                for node, value in zip(nodes, values, strict=True) if of == part else ():
                    tree.add(value.clone(), node)
            if tree.total is None:
                raise RuntimeError("the microbatches of a group are not those of a step")
            total = tree.total if total is None else total.add_(tree.total)
        if total is None:
            raise RuntimeError("a group has at least one part")
        return total.add_(0.0)  # a negative zero would tell how many zeros were added


def all_reduce_pairwise(
    group: dist.ProcessGroup | None, assignment: MicrobatchAssignment, local: PairwiseSum, out: Tensor
) -> None:
    """Fill `out` [n] with the sum over the group of what its members have added up so far."""
    if group is None:
        torch.add(local.open_nodes[assignment.list_nodes()[0][0]], 0.0, out=out)
        return
    ranks, n = len(assignment.microbatches_by_rank), out.numel()
    size = -(-n // ranks)  # of the part that each rank adds up
    counts = [len(nodes) for nodes in assignment.list_nodes()]
    own = torch.stack([local.open_nodes[node] for node in assignment.list_nodes()[assignment.rank]])
    own = nn.functional.pad(own, (0, size * ranks - n)).view(-1, ranks, size).transpose(0, 1).contiguous()
    received = own.new_empty(sum(counts) * size)
    splits = [count * size for count in counts]
    dist.all_to_all_single(received, own.view(-1), splits, [own[0].numel()] * ranks, group=group)
    parts = [part.view(-1, size).unbind() for part in torch.split(received, splits)]
    gathered = received.new_empty(ranks * size)
    all_gather_flat(gathered, assignment.sum_nodes(parts), group)
    out.copy_(gathered[:n])


class DeterministicDDPSync:
    """Parameters that every rank of a group holds; a parameter that no loss reached keeps no gradient."""

    def __init__(
        self,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        assignment: MicrobatchAssignment,
        bucket_mib: int,
    ):
        """`parameters` by pipeline stage; `group` None: this rank alone."""
        self._group, self._assignment = group, assignment
        self._buckets = {
            stage: [
                _Bucket(part, assignment.num_microbatches)
                for part in split_into_buckets(list(named.values()), bucket_mib * 2**20)
            ]
            for stage, named in parameters.items()
        }

    @contextmanager
    def backward_context(self, stage: int, microbatch: int, *, is_last: bool, split: bool = False) -> Iterator[None]:
        """One backward pass; its gradients are put into the tree when it ends."""
        yield
        run = self._assignment.microbatches_by_rank[self._assignment.rank]
        for bucket in self._buckets[stage]:
            bucket.add_grads(run[microbatch] if microbatch < len(run) else None)

    def post_backward_weight(self, stage: int, *, is_last: bool) -> None:
        """No schedule that splits backward passes comes here: the plan refuses it."""

    def finish_grad_sync(self) -> None:
        """Sum over the group and give parameters their gradients."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.finish(self._group, self._assignment)


class _Bucket:
    """Some parameters, and one tree of their gradients as flat tensors, with a mark for each one that was reached."""

    def __init__(self, parameters: list[nn.Parameter], num_microbatches: int):
        self._parameters, self._num_microbatches = parameters, num_microbatches
        self._tree = PairwiseSum(num_microbatches)

    def add_grads(self, microbatch: int | None) -> None:
        """Move what a backward pass left on the parameters into the tree; None: a spare pass, which counts nothing."""
        if microbatch is not None:
            flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            marks = self._parameters[0].new_tensor([float(p.grad is not None) for p in self._parameters])
            self._tree.add(torch.cat([*(grad.reshape(-1) for grad in flat), marks]), (0, microbatch))
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self, group: dist.ProcessGroup | None, assignment: MicrobatchAssignment) -> None:
        """Set the gradients and begin again."""
        sizes = [parameter.numel() for parameter in self._parameters]
        summed = self._parameters[0].new_empty(sum(sizes) + len(sizes), requires_grad=False)
        all_reduce_pairwise(group, assignment, self._tree, summed)
        self._tree = PairwiseSum(self._num_microbatches)
        *parts, marks = torch.split(summed, [*sizes, len(sizes)])
        for parameter, part, mark in zip(self._parameters, parts, marks.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if mark > 0 else None


class MicrobatchCursor:
    """Which of this rank's microbatches runs, shared by the collectives of all of its shards."""

    def __init__(self) -> None:
        self.microbatch, self.is_last = 0, False


class DeterministicReduceScatter:
    """Instead of FSDP2's reduce-scatter, and its all-reduce over replicas: given to one of its modules."""

    def __init__(
        self,
        cursor: MicrobatchCursor,
        shards: MicrobatchAssignment,
        replicas: MicrobatchAssignment,
        replica_group: dist.ProcessGroup | None,
    ):
        """`shards`: the ranks over which state is sharded; `copies`: those that hold the same shard."""
        self._cursor, self._shards, self._replicas, self._replica_group = cursor, shards, replicas, replica_group
        self._tree = PairwiseSum(shards.num_microbatches)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What FSDP2 asks for: an ordinary buffer."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Add everybody's part of `input_tensor` [ranks * n] to the tree. `output_tensor` [n] is 0 until the last."""
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for run, part in zip(
            self._shards.microbatches_by_rank, received.chunk(len(self._shards.microbatches_by_rank)), strict=True
        ):
            if self._cursor.microbatch < len(run):
                self._tree.add(part.clone(), (0, run[self._cursor.microbatch]))
        output_tensor.zero_()

    def all_reduce_hook(self, output: Tensor) -> None:
        """FSDP2's hook after the reduce-scatter: with the last microbatch, the sum over all who hold this shard."""
        if self._cursor.is_last:
            all_reduce_pairwise(self._replica_group, self._replicas, self._tree, output)
            self._tree = PairwiseSum(self._shards.num_microbatches)


@dataclass(frozen=True)
class ReductionOrder:
    """What the ranks that hold the same state compute, and what those that share it out by ZeRO do."""

    replicas: MicrobatchAssignment
    shards: MicrobatchAssignment


def make_reduction_order(layout: Layout, batching: Batching, rank: int) -> ReductionOrder:
    """Who computes what, as a rank sees it."""
    at, runs = layout.get_coordinates(rank), [tuple(run) for run in batching.split_by_rank(layout.dp_size)]
    shards = [runs[at["dp_replicate"] * layout.dp_shard + shard] for shard in range(layout.dp_shard)]
    together = [
        tuple(sorted(leaf for run in runs[first : first + layout.dp_shard] for leaf in run))
        for first in range(0, len(runs), layout.dp_shard)
    ]
    copies = [(run, part) for run in together for part in range(layout.cp)]
    member = at["dp_replicate"] * layout.cp + at["cp"]
    return ReductionOrder(
        MicrobatchAssignment(
            batching.count, tuple(run for run, _ in copies), tuple(part for _, part in copies), member
        ),
        MicrobatchAssignment(batching.count, tuple(shards), (0,) * layout.dp_shard, at["dp_shard"]),
    )
