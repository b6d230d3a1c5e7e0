"""Pairwise summation over the microbatches of a step, in an order that does not depend on the ranks.

The leaves of a binary tree are the logical microbatches 0..num_leaves-1. A node is the sum of its two children, or its
only child at the right edge of an odd level. Ranks add the nodes that they can from their own microbatches and send the
open ones. The same pairs are added for any assignment of microbatches to ranks, so the result is bitwise identical.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from raytrain_hpc.parallel.sum_check import SumCheck

Node = tuple[int, int]  # (level, index on the level); leaves are level 0


class PairwiseSum:
    """A pairwise sum of values that are added in any order. Values are modified in place."""

    def __init__(self, num_leaves: int):
        """`num_leaves`: number of values in the sum."""
        self._num_leaves = num_leaves
        self.check: SumCheck | None = None  # of the additions; set it before the first one
        self.open_nodes: dict[Node, Tensor] = {}  # nodes whose sibling is missing; finally the root alone

    def add(self, value: Tensor, node: Node) -> list[Tensor]:
        """Add the value of a node to the tree, and sum the parents that this completes.

        Returns the tensors that the sum does not need any more.
        """
        node, consumed = _promote(node, self._num_leaves), []
        if self.check is not None:
            self.check.record(value)
        while (sibling := self.open_nodes.pop((node[0], node[1] ^ 1), None)) is not None:
            if self.check is not None:
                self.check.pre_add(sibling, value)
            consumed.append(value)
            value = sibling.add_(value)  # floating-point addition is commutative
            node = _promote((node[0] + 1, node[1] >> 1), self._num_leaves)
        self.open_nodes[node] = value
        return consumed

    @property
    def total(self) -> Tensor | None:
        """The sum over all leaves; None while some are missing."""
        return self.open_nodes.get((_get_height(self._num_leaves), 0))


def list_open_nodes(leaves: Iterable[int], num_leaves: int) -> list[Node]:
    """Return the open nodes after adding `leaves`: those that a rank with these microbatches sends, sorted."""
    tree = PairwiseSum(num_leaves)
    for leaf in leaves:
        tree.add(torch.empty(0), (0, leaf))
    return sorted(tree.open_nodes)


def sum_pairwise(values: Tensor) -> Tensor:
    """Sum values [num_leaves, ...] over the first dimension in the order of the tree, to [...]; 0 without values."""
    while len(values) > 1:
        even = len(values) // 2 * 2
        values = torch.cat((values[0:even:2] + values[1:even:2], values[even:]))
    return values[0] if len(values) else values.sum(0)


def _promote(node: Node, num_leaves: int) -> Node:
    """Return the lowest node at or above `node` with a sibling, or the root: an only child equals its parent."""
    level, index = node
    while (width := _get_level_width(level, num_leaves)) > 1 and index ^ 1 >= width:
        level, index = level + 1, index >> 1
    return level, index


def _get_level_width(level: int, num_leaves: int) -> int:
    return -(-num_leaves >> level)


def _get_height(num_leaves: int) -> int:
    return max(num_leaves - 1, 0).bit_length()
