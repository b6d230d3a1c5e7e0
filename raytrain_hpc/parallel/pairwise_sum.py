"""One order of additions for what is summed over a step's microbatches, whoever computed them.

Leaves are the logical microbatches 0..count-1; a node of the tree is the sum of its two children, or its only child
where the level above is narrower. Ranks add what they can of their own microbatches and hand on the nodes that are
left open: whatever the shares, the same pairs are added, and so the same bits come out.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Node = tuple[int, int]  # level, 0 for leaves, and place on it


class PairwiseSum:
    """Adds up values as they come, in any order. Owns what it is given."""

    def __init__(self, num_leaves: int):
        """`count`: leaves."""
        self._num_leaves = num_leaves
        self.open_nodes: dict[Node, Tensor] = {}  # nodes whose sibling is still to come; at the end the root alone

    def add(self, value: Tensor, node: Node) -> None:
        """Put the value of a node in its place, and add up whatever that completes."""
        node = _promote(node, self._num_leaves)
        while (other := self.open_nodes.pop((node[0], node[1] ^ 1), None)) is not None:
            value = other.add_(value)  # two floats give one sum, whichever comes first
            node = _promote((node[0] + 1, node[1] >> 1), self._num_leaves)
        self.open_nodes[node] = value

    @property
    def total(self) -> Tensor | None:
        """The sum over all leaves, None while some are missing."""
        return self.open_nodes.get((_get_height(self._num_leaves), 0))


def list_open_nodes(leaves: Iterable[int], num_leaves: int) -> list[Node]:
    """The nodes that a rank which computes the microbatches of `run` hands on, in a fixed order."""
    tree = PairwiseSum(num_leaves)
    for leaf in leaves:
        tree.add(torch.empty(0), (0, leaf))
    return sorted(tree.open_nodes)


def sum_pairwise(values: Tensor) -> Tensor:
    """The sum over the first dimension of values [count, ...] in the order of the tree, [...]; of none it is 0."""
    while len(values) > 1:
        even = len(values) // 2 * 2
        values = torch.cat((values[0:even:2] + values[1:even:2], values[even:]))
    return values[0] if len(values) else values.sum(0)


def _promote(node: Node, num_leaves: int) -> Node:
    """A node without a sibling is its parent."""
    level, place = node
    while (width := _get_level_width(level, num_leaves)) > 1 and place ^ 1 >= width:
        level, place = level + 1, place >> 1
    return level, place


def _get_level_width(level: int, num_leaves: int) -> int:
    return -(-num_leaves >> level)


def _get_height(num_leaves: int) -> int:
    return max(num_leaves - 1, 0).bit_length()
