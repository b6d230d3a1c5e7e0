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

from raytrain_hpc.parallel.blocking_collectives import gather_flat
from raytrain_hpc.parallel.ddp import partition
from raytrain_hpc.parallel.pairwise_sum import Node, PairwiseSum, open_nodes
from raytrain_hpc.planner.layout import Batching, Layout


@dataclass(frozen=True)
class Shares:
    """Who of a group computes what: the microbatches of each member, out of `count`, and which part of them."""

    count: int
    runs: tuple[tuple[int, ...], ...]
    parts: tuple[int, ...]
    member: int  # this rank

    def nodes(self) -> list[list[Node]]:
        """What each member hands on."""
        return [open_nodes(run, self.count) for run in self.runs]

    def add_up(self, received: Sequence[Sequence[Tensor]]) -> Tensor:
        """The sum of the members' nodes, as `nodes` lists them."""
        total: Tensor | None = None
        for part in range(max(self.parts) + 1):
            tree = PairwiseSum(self.count)
            for nodes, values, of in zip(self.nodes(), received, self.parts, strict=True):
                for node, value in zip(nodes, values, strict=True) if of == part else ():
                    tree.add(value.clone(), node)
            if tree.total is None:
                raise RuntimeError("the microbatches of a group are not those of a step")
            total = tree.total if total is None else total.add_(tree.total)
        if total is None:
            raise RuntimeError("a group has at least one part")
        return total.add_(0.0)  # a negative zero would tell how many zeros were added


def sum_over(group: dist.ProcessGroup | None, shares: Shares, mine: PairwiseSum, out: Tensor) -> None:
    """Fill `out` [n] with the sum over the group of what its members have added up so far."""
    if group is None:
        torch.add(mine.open[shares.nodes()[0][0]], 0.0, out=out)
        return
    ranks, n = len(shares.runs), out.numel()
    size = -(-n // ranks)  # of the part that each rank adds up
    counts = [len(nodes) for nodes in shares.nodes()]
    own = torch.stack([mine.open[node] for node in shares.nodes()[shares.member]])
    own = nn.functional.pad(own, (0, size * ranks - n)).view(-1, ranks, size).transpose(0, 1).contiguous()
    received = own.new_empty(sum(counts) * size)
    splits = [count * size for count in counts]
    dist.all_to_all_single(received, own.view(-1), splits, [own[0].numel()] * ranks, group=group)
    parts = [part.view(-1, size).unbind() for part in torch.split(received, splits)]
    gathered = received.new_empty(ranks * size)
    gather_flat(gathered, shares.add_up(parts), group)
    out.copy_(gathered[:n])


class CanonicalReplicas:
    """Parameters that every rank of a group holds; a parameter that no loss reached keeps no gradient."""

    def __init__(
        self,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        shares: Shares,
        bucket_mib: int,
    ):
        """`parameters` by pipeline stage; `group` None: this rank alone."""
        self._group, self._shares = group, shares
        self._buckets = {
            stage: [_Bucket(part, shares.count) for part in partition(list(named.values()), bucket_mib * 2**20)]
            for stage, named in parameters.items()
        }

    @contextmanager
    def backward(self, stage: int, microbatch: int, *, last: bool, split: bool = False) -> Iterator[None]:
        """One backward pass; its gradients are put into the tree when it ends."""
        yield
        run = self._shares.runs[self._shares.member]
        for bucket in self._buckets[stage]:
            bucket.take(run[microbatch] if microbatch < len(run) else None)

    def weights_done(self, stage: int, *, last: bool) -> None:
        """No schedule that splits backward passes comes here: the plan refuses it."""

    def finish(self) -> None:
        """Sum over the group and give parameters their gradients."""
        for buckets in self._buckets.values():
            for bucket in buckets:
                bucket.finish(self._group, self._shares)


class _Bucket:
    """Some parameters, and one tree of their gradients as flat tensors, with a mark for each one that was reached."""

    def __init__(self, parameters: list[nn.Parameter], count: int):
        self._parameters, self._count = parameters, count
        self._tree = PairwiseSum(count)

    def take(self, leaf: int | None) -> None:
        """Move what a backward pass left on the parameters into the tree; None: a spare pass, which counts nothing."""
        if leaf is not None:
            flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            marks = self._parameters[0].new_tensor([float(p.grad is not None) for p in self._parameters])
            self._tree.add(torch.cat([*(grad.reshape(-1) for grad in flat), marks]), (0, leaf))
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self, group: dist.ProcessGroup | None, shares: Shares) -> None:
        """Set the gradients and begin again."""
        sizes = [parameter.numel() for parameter in self._parameters]
        summed = self._parameters[0].new_empty(sum(sizes) + len(sizes), requires_grad=False)
        sum_over(group, shares, self._tree, summed)
        self._tree = PairwiseSum(self._count)
        *parts, marks = torch.split(summed, [*sizes, len(sizes)])
        for parameter, part, mark in zip(self._parameters, parts, marks.tolist(), strict=True):
            parameter.grad = part.view_as(parameter) if mark > 0 else None


class Turn:
    """Which of this rank's microbatches runs, shared by the collectives of all of its shards."""

    def __init__(self) -> None:
        self.microbatch, self.last = 0, False


class CanonicalReduceScatter:
    """Instead of FSDP2's reduce-scatter, and its all-reduce over replicas: given to one of its modules."""

    def __init__(self, turn: Turn, shards: Shares, copies: Shares, copies_group: dist.ProcessGroup | None):
        """`shards`: the ranks over which state is sharded; `copies`: those that hold the same shard."""
        self._turn, self._shards, self._copies, self._group = turn, shards, copies, copies_group
        self._tree = PairwiseSum(shards.count)

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
        for run, part in zip(self._shards.runs, received.chunk(len(self._shards.runs)), strict=True):
            if self._turn.microbatch < len(run):
                self._tree.add(part.clone(), (0, run[self._turn.microbatch]))
        output_tensor.zero_()

    def over_copies(self, output: Tensor) -> None:
        """FSDP2's hook after the reduce-scatter: with the last microbatch, the sum over all who hold this shard."""
        if self._turn.last:
            sum_over(self._group, self._copies, self._tree, output)
            self._tree = PairwiseSum(self._shards.count)


@dataclass(frozen=True)
class Canonical:
    """What the ranks that hold the same state compute, and what those that share it out by ZeRO do."""

    copies: Shares
    shards: Shares


def canonical_shares(layout: Layout, batching: Batching, rank: int) -> Canonical:
    """Who computes what, as a rank sees it."""
    at, runs = layout.coordinates(rank), [tuple(run) for run in batching.shares(layout.data_parallel)]
    shards = [runs[at["dp_replicate"] * layout.dp_shard + shard] for shard in range(layout.dp_shard)]
    together = [
        tuple(sorted(leaf for run in runs[first : first + layout.dp_shard] for leaf in run))
        for first in range(0, len(runs), layout.dp_shard)
    ]
    copies = [(run, part) for run in together for part in range(layout.cp)]
    member = at["dp_replicate"] * layout.cp + at["cp"]
    return Canonical(
        Shares(batching.count, tuple(run for run, _ in copies), tuple(part for _, part in copies), member),
        Shares(batching.count, tuple(shards), (0,) * layout.dp_shard, at["dp_shard"]),
    )
