"""An all-reduce in a fixed order of additions: ranks exchange the nodes of a summation tree, and each sums one slice.

In audits, each rank also sums the slice of another one, so that two ranks have computed every sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.parallel.blocking_collectives import all_gather_flat, wait_all
from raytrain_hpc.parallel.computation_trace import SumTrace
from raytrain_hpc.parallel.reduction_order import ContributionAssignment, PartitionedSum


class NodeExchange:
    """An asynchronous exchange of the tree nodes of the ranks of a group, of which each rank receives one slice."""

    def __init__(
        self, nodes: Sequence[Tensor], assignment: ContributionAssignment, group: dist.ProcessGroup, shift: int = 0
    ):
        """Start to send the nodes of this rank, flat, in the order of the assignment. The ranks divide their size.

        `shift`: receive the slice of the rank `shift` further instead of this rank's.
        """
        num_ranks = len(assignment.nodes_by_rank)
        self._assignment, self._slice_size = assignment, nodes[0].numel() // num_ranks
        self._recv_sizes = [len(of_rank) * self._slice_size for of_rank in assignment.nodes_by_rank]
        self._received = nodes[0].new_empty(sum(self._recv_sizes))
        send_sizes = [len(nodes) * self._slice_size] * num_ranks
        # By destination rank, then by node; lives until the exchange is complete.
        stacked = torch.stack([node.view(num_ranks, -1) for node in nodes], dim=1).view(-1)
        self._send_buffer = rotate_slices(stacked, num_ranks, shift)
        work = dist.all_to_all_single(
            self._received, self._send_buffer, self._recv_sizes, send_sizes, group=group, async_op=True
        )
        self._works = [] if work is None else [work]

    def add_received(self, total: PartitionedSum, trace: SumTrace | None = None) -> None:
        """Wait, and add the slices of all nodes to a sum."""
        wait_all(self._works)
        if trace is not None:
            trace.add_received(self._received)
        received = [part.view(-1, self._slice_size).unbind() for part in torch.split(self._received, self._recv_sizes)]
        for nodes, values in zip(self._assignment.nodes_by_rank, received, strict=True):
            for node, value in zip(nodes, values, strict=True):
                total.add(value, node)


@dataclass(frozen=True)
class SumAudit:
    """The audit of an all-reduce. `own`: traces the slice that this rank sums.

    `other`: traces the slice of the rank `shift` further, which this rank sums too; None: it does not, since other
    ranks compute the whole all-reduce again. `own` then has the addends too that this rank sends.
    """

    own: SumTrace
    other: SumTrace | None = None
    shift: int = 0


class PairwiseAllReduce:
    """An all-reduce in a fixed order of additions, in two asynchronous exchanges: `start`, `advance`, `finish`.

    Between the calls, other work can run, and other all-reduces of the group: all ranks must call in the same order.
    `group` None: this rank alone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        assignment: ContributionAssignment,
        local: PartitionedSum,
        audit: SumAudit | None = None,
    ):
        """`local`: the contributions of this rank, flat tensors; they are overwritten."""
        self._group, self._assignment, self._local, self._audit = group, assignment, local, audit
        self._works: list[dist.Work] = []
        self._other_exchange: NodeExchange | None = None
        # With one node on each of two ranks there is one addition, in which an all-reduce has no choice.
        is_one_addition = [len(nodes) for nodes in assignment.nodes_by_rank] == [1, 1]
        self._is_one_addition = is_one_addition and audit is None

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
        padded = [_pad(node, num_ranks) for node in nodes]
        if self._audit is not None and self._audit.other is None:
            for node in padded:
                self._audit.own.add_sent(node)
        self._summed, self._exchange = padded[0], NodeExchange(padded, self._assignment, self._group)
        if self._audit is not None and self._audit.other is not None:
            self._other_exchange = NodeExchange(padded, self._assignment, self._group, self._audit.shift)

    def advance(self) -> None:
        """Sum the slices that were received, and start to gather the sums."""
        if self._group is None or self._is_one_addition:
            return
        total = self._sum(self._exchange, None if self._audit is None else self._audit.own)
        del self._exchange
        if self._other_exchange is not None and self._audit is not None:
            self._sum(self._other_exchange, self._audit.other)
            self._other_exchange = None
        self._wait_later(all_gather_flat(self._summed, total, self._group, async_op=True))

    def finish(self) -> Tensor:
        """Wait, and return the sum, flat, in the memory of a contribution if the ranks divide its size."""
        if self._group is None:
            total = self._local.compute_total()
            if self._audit is not None:
                self._audit.own.add_sum(total)
            return total
        wait_all(self._works)
        return self._summed

    def _sum(self, exchange: NodeExchange, trace: SumTrace | None) -> Tensor:
        total = self._assignment.make_sum()
        exchange.add_received(total, trace)
        value = total.compute_total()
        if trace is not None:
            trace.add_sum(value)
        return value

    def _wait_later(self, work: dist.Work | None) -> None:
        self._works = [] if work is None else [work]


def _pad(flat: Tensor, num_ranks: int) -> Tensor:
    """Return the tensor itself if the ranks divide its size, else a copy with zeros at the end."""
    padding = -flat.numel() % num_ranks
    return nn.functional.pad(flat, (0, padding)) if padding else flat


def rotate_slices(flat: Tensor, num_ranks: int, shift: int) -> Tensor:
    """Return a tensor of one slice per rank, in which that of the rank `shift` further takes the place of each."""
    return flat.view(num_ranks, -1).roll(-shift, 0).view(-1) if shift else flat
