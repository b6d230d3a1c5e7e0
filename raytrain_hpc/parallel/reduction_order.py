"""The order in which gradients are added under `train.deterministic=elastic`, and the ranks that have them.

A gradient contribution is that of one microbatch, or of one part of it where context parallelism splits sequences.
With expert parallelism, a rank computes the contributions of all ranks that send positions to its experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from raytrain_hpc.parallel.pairwise_sum import Node, PairwiseSum, list_open_nodes
from raytrain_hpc.parallel.sum_check import SumCheck
from raytrain_hpc.planner.layout import Batching, Layout

Contribution = tuple[int, int]  # (part, microbatch); part: the context-parallel coordinate
PartNode = tuple[int, Node]  # (part, node of the tree of that part)


class PartitionedSum:
    """A pairwise sum per part over the microbatches of a step; the sums of the parts are added in order.

    Add 0.0 to contributions: sums are then never -0.0, whose sign would depend on how many zeros were added.
    """

    def __init__(self, num_microbatches: int, num_parts: int):
        self._trees = [PairwiseSum(num_microbatches) for _ in range(num_parts)]
        self._check: SumCheck | None = None

    @property
    def is_checked(self) -> bool:
        """Whether `set_check` was called."""
        return self._check is not None

    def set_check(self, check: SumCheck) -> None:
        """Check all additions. Call before the first one."""
        self._check = check
        for tree in self._trees:
            tree.check = check

    def verify_nodes(self) -> None:
        """Verify the open nodes, if additions are checked. Call when their values have been read."""
        if self._check is not None:
            self._check.verify(self.open_nodes.values())

    def add(self, value: Tensor, part_node: PartNode) -> list[Tensor]:
        """Add the value of a node, which is modified in place. Return the tensors that are not needed any more."""
        part, node = part_node
        return self._trees[part].add(value, node)

    @property
    def open_nodes(self) -> dict[PartNode, Tensor]:
        """The nodes whose sibling is missing, and their values."""
        return {(part, node): value for part, tree in enumerate(self._trees) for node, value in tree.open_nodes.items()}

    def compute_total(self) -> Tensor:
        """Return the sum. Raises RuntimeError if a microbatch is missing."""
        first, *others = [tree.total for tree in self._trees]
        for total in others:
            first = None if first is None or total is None else first.add_(total)
        if first is None:
            raise RuntimeError("the ranks of a group do not compute all microbatches of the step")
        return first


@dataclass(frozen=True)
class ContributionAssignment:
    """The contributions that each rank of a group has."""

    num_microbatches: int  # of a step, over all ranks
    num_parts: int
    contributions_by_rank: tuple[tuple[Contribution, ...], ...]
    rank: int  # this rank

    def make_sum(self) -> PartitionedSum:
        """Return an empty sum."""
        return PartitionedSum(self.num_microbatches, self.num_parts)

    @cached_property
    def nodes_by_rank(self) -> list[list[PartNode]]:
        """The tree nodes that each rank sends, in order."""
        return [self._list_nodes(contributions) for contributions in self.contributions_by_rank]

    @property
    def local_nodes(self) -> list[PartNode]:
        """The tree nodes that this rank sends, in order."""
        return self.nodes_by_rank[self.rank]

    def _list_nodes(self, contributions: Iterable[Contribution]) -> list[PartNode]:
        microbatches: dict[int, list[int]] = {}
        for part, microbatch in contributions:
            microbatches.setdefault(part, []).append(microbatch)
        return [
            (part, node)
            for part, of_part in sorted(microbatches.items())
            for node in list_open_nodes(of_part, self.num_microbatches)
        ]


# By slot (the number of a microbatch on its rank), then by source rank; None: a padding microbatch.
Slots = tuple[tuple[Contribution | None, ...], ...]


@dataclass(frozen=True)
class ReductionOrder:
    """Contributions to the gradients of some parameters.

    `slots_by_rank`: what each rank computes of the ranks over which ZeRO shards the parameters, and `shards`: the same
    without slots. `replicas`: what the ranks have that hold the same shard, after the reduction over the former.
    """

    slots_by_rank: tuple[Slots, ...]
    shards: ContributionAssignment
    replicas: ContributionAssignment

    @property
    def local_slots(self) -> Slots:
        """What this rank computes."""
        return self.slots_by_rank[self.shards.rank]


@dataclass(frozen=True)
class ReductionOrders:
    """Reduction orders of the dense parameters of a rank and of its experts; None without expert parallelism."""

    dense: ReductionOrder
    experts: ReductionOrder | None


def make_reduction_orders(layout: Layout, batching: Batching, rank: int) -> ReductionOrders:
    """Return the reduction orders of the parameters of a rank."""
    experts = _make_expert_order(layout, batching, rank) if layout.ep > 1 else None
    return ReductionOrders(_make_dense_order(layout, batching, rank), experts)


def _make_dense_order(layout: Layout, batching: Batching, rank: int) -> ReductionOrder:
    """Return the order of dense gradients: each rank computes the contributions of its own microbatches."""
    coordinates = layout.get_coordinates(rank)
    peers = [
        [
            layout.get_rank({**coordinates, "dp_replicate": replicate, "dp_shard": shard, "cp": cp})
            for shard in range(layout.dp_shard)
        ]
        for replicate in range(layout.dp_replicate)
        for cp in range(layout.cp)
    ]
    return _make_order(layout, batching, [[(member,) for member in shards] for shards in peers], peers, rank)


def _make_expert_order(layout: Layout, batching: Batching, rank: int) -> ReductionOrder:
    """Return the order of experts' gradients: a rank computes the contributions of all ranks of its "ep" axis."""
    key = _get_model_parallel_coordinates(layout, rank)
    ranks = [r for r in range(layout.world_size) if _get_model_parallel_coordinates(layout, r) == key]
    experts = {member: layout.get_expert_coordinates(member) for member in ranks}
    sizes = layout.expert_axis_sizes
    by_coordinates = {(place["copies"], place["dp_shard"], place["ep"]): member for member, place in experts.items()}
    own_ep = experts[rank]["ep"]
    grid = [(copy, shard) for copy in range(sizes["copies"]) for shard in range(sizes["dp_shard"])]
    sources = {place: tuple(by_coordinates[(*place, ep)] for ep in range(layout.ep)) for place in grid}
    rows = [[(copy, shard) for shard in range(sizes["dp_shard"])] for copy in range(sizes["copies"])]
    return _make_order(
        layout,
        batching,
        [[sources[place] for place in row] for row in rows],
        [[by_coordinates[(*place, own_ep)] for place in row] for row in rows],
        rank,
    )


def _make_order(
    layout: Layout,
    batching: Batching,
    sources: Sequence[Sequence[tuple[int, ...]]],
    ranks: Sequence[Sequence[int]],
    rank: int,
) -> ReductionOrder:
    """Return the order of `rank`. `ranks`: by replica, then by shard; `sources`: whose contributions each computes."""
    replica, shard_rank = next((i, row.index(rank)) for i, row in enumerate(ranks) if rank in row)
    slots = [[_list_slots(layout, batching, of_rank) for of_rank in row] for row in sources]
    make_assignment = partial(ContributionAssignment, batching.count, layout.cp)
    shards = make_assignment(tuple(_list_contributions([of_rank]) for of_rank in slots[replica]), shard_rank)
    replicas = make_assignment(tuple(_list_contributions(row) for row in slots), replica)
    return ReductionOrder(tuple(slots[replica]), shards, replicas)


def _list_contributions(slots_by_rank: Iterable[Slots]) -> tuple[Contribution, ...]:
    items = (item for of_rank in slots_by_rank for slot in of_rank for item in slot)
    return tuple(sorted(item for item in items if item is not None))


def _list_slots(layout: Layout, batching: Batching, sources: Sequence[int]) -> Slots:
    microbatches_by_dp_rank = batching.split_by_rank(layout.dp_size)
    of_sources = [
        [(layout.get_coordinates(s)["cp"], microbatch) for microbatch in microbatches_by_dp_rank[layout.get_dp_rank(s)]]
        for s in sources
    ]
    num_slots = max(len(items) for items in of_sources)
    return tuple(tuple(items[slot] if slot < len(items) else None for items in of_sources) for slot in range(num_slots))


def _get_model_parallel_coordinates(layout: Layout, rank: int) -> tuple[int, int]:
    coordinates = layout.get_coordinates(rank)
    return coordinates["pp"], coordinates["tp"]
