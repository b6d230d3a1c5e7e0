"""Exchange of matrices between ranks, so that each is whole on one rank while an update of it is computed.

A matrix may be sharded over ranks, by rows, columns or both, and the shards replicated. It is assigned to one of the
ranks that hold a shard. That rank gathers the shards from its own replica of the state, computes, and sends every rank
the regions that it holds. The plan is made once per generation from the indexes of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.optim.newton_schulz import estimate_cost
from raytrain_hpc.state.reshard import Transfer, exchange_regions
from raytrain_hpc.state.shard_index import Box, RegionCopy, StateIndex, TensorSlices
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, get_dtype_name

_ROUND_ELEMENTS = 1 << 26  # of the matrices that a rank holds at once; bounds temporary memory


@dataclass(frozen=True)
class Matrix:
    """One matrix of a tensor: the whole of it, or, of a stack of matrices, one of them."""

    name: str
    shape: tuple[int, ...]  # of the tensor
    box: Box

    @property
    def cost(self) -> int:
        """Multiplications of its orthogonalization."""
        return estimate_cost(*self.box.sizes[-2:])


@dataclass
class ExchangeRound:
    """Matrices that are whole at the same time, and the transfers that this rank takes part in."""

    own: list[Matrix] = field(default_factory=list)
    gathers: list[Transfer] = field(default_factory=list)
    scatters: list[Transfer] = field(default_factory=list)


class MatrixExchange:
    """Plan and execution of the exchange.

    `indexes`: by rank, the boxes of all matrices that it holds. `replicas`: by rank, the number of its replica of the
    state. `group`: all ranks, None if this rank is alone; `device`: where it communicates. `draw`: a number that
    assigns each matrix to another holder, for audits.
    """

    def __init__(
        self,
        indexes: Sequence[StateIndex],
        replicas: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        draw: int | None = None,
    ):
        self._indexes, self._replicas, self._rank = indexes, replicas, rank
        self._group, self._device = group, device
        self._holders = _find_holders(indexes)
        self._overlapping: dict[tuple[int, str], list[int]] = {}
        self.owners = assign_owners(self._holders)
        if draw is not None:
            for matrix, owner in self.owners.items():
                holders = self._holders[matrix]
                shift = 1 + draw % max(1, len(holders) - 1)
                self.owners[matrix] = holders[(holders.index(owner) + shift) % len(holders)]
        self.rounds = self._plan_rounds()

    def move_owners(self, draw: int) -> MatrixExchange:
        """Return an exchange in which another holder owns each matrix, if there is one. `draw`: chooses it."""
        return MatrixExchange(self._indexes, self._replicas, self._rank, self._group, self._device, draw)

    def run(
        self,
        shards: ShardedState,
        compute: Callable[[list[Tensor]], None],
        inspect: Callable[[Matrix, Tensor], None] | None = None,
    ) -> None:
        """Replace the matrices that all ranks hold as `shards` by the results of `compute`. Collective.

        `shards`: the local boxes, as in this rank's index. `compute` changes whole matrices, two-dimensional and
        contiguous, in place. `inspect`: called with each matrix of this rank and its result.
        """
        for current in self.rounds:
            wholes = self._allocate(current.own, shards)
            self._transfer(current.gathers, wholes, shards)
            results = [shard.tensor.view(shard.box.sizes[-2:]) for shard in wholes]
            compute(results)
            if inspect is not None:
                for matrix, result in zip(current.own, results, strict=True):
                    inspect(matrix, result)
            self._transfer(current.scatters, shards, wholes)

    def _allocate(self, matrices: Sequence[Matrix], shards: ShardedState) -> ShardedState:
        dtype = next((shard.tensor.dtype for shard in shards), torch.float32)
        return ShardedState(
            StateShard(
                matrix.name,
                matrix.shape,
                get_dtype_name(dtype),
                matrix.box,
                torch.empty(matrix.box.sizes, dtype=dtype, device=self._device),
            )
            for matrix in matrices
        )

    def _transfer(self, transfers: Sequence[Transfer], destination: ShardedState, source: ShardedState) -> None:
        for transfer in transfers:
            if transfer.source_rank == transfer.destination_rank:
                transfer.select_in(destination).copy_(transfer.select_from(source))
        if self._group is not None:
            remote = [transfer for transfer in transfers if transfer.source_rank != transfer.destination_rank]
            itemsize = next((shard.tensor.itemsize for shard in (*source, *destination)), 0)
            sized = [
                Transfer(t.source_rank, t.destination_rank, t.region_copy, t.region_copy.region.numel * itemsize)
                for t in remote
            ]
            exchange_regions(sized, destination, source, self._rank, self._group, self._device)

    def _plan_rounds(self) -> list[ExchangeRound]:
        """Plan rounds in which each rank has at most `_ROUND_ELEMENTS`, or one matrix. All ranks have equally many."""
        owned: dict[int, list[list[Matrix]]] = {}
        for matrix in sorted(self.owners, key=_get_order):
            rounds = owned.setdefault(self.owners[matrix], [[]])
            if rounds[-1] and sum(m.box.numel for m in rounds[-1]) + matrix.box.numel > _ROUND_ELEMENTS:
                rounds.append([])
            rounds[-1].append(matrix)
        plans = []
        for number in range(max(map(len, owned.values()), default=0)):
            current = ExchangeRound()
            for owner, rounds in owned.items():
                if number < len(rounds):
                    self._plan_owner(current, owner, rounds[number])
            plans.append(current)
        return plans

    def _plan_owner(self, current: ExchangeRound, owner: int, matrices: Sequence[Matrix]) -> None:
        """Add the transfers to and from one owner in which this rank takes part.

        Both sides compute the regions between them from the same indexes, in the same order.
        """
        is_own = owner == self._rank
        if is_own:
            current.own = list(matrices)
        numbers = _number_boxes(matrices)
        for matrix in matrices:
            holders = self._holders[matrix]
            for source in holders if is_own else (self._rank,):
                if source in holders and self._replicas[source] == self._replicas[owner]:
                    for number, region in self._list_regions(source, owner, matrix):
                        box = self._indexes[source][matrix.name].boxes[number]
                        copy = _make_copy(matrix.name, region, (number, box), (numbers[matrix], matrix.box))
                        current.gathers.append(Transfer(source, owner, copy, 0))
            for rank in holders if is_own else (self._rank,):
                if rank in holders:
                    for number, box in enumerate(self._indexes[rank][matrix.name].boxes):
                        if (region := box.intersection(matrix.box)).numel:
                            copy = _make_copy(matrix.name, region, (numbers[matrix], matrix.box), (number, box))
                            current.scatters.append(Transfer(owner, rank, copy, 0))

    def _list_regions(self, source: int, owner: int, matrix: Matrix) -> list[tuple[int, Box]]:
        """Return (box number, region) of what a rank sends to an owner: what it holds and no rank before it does.

        The order of ranks begins with the owner.
        """
        world = len(self._indexes)
        taken = [
            box
            for rank in self._find_overlapping(source, matrix.name)
            if (rank - owner) % world < (source - owner) % world
            for box in self._indexes[rank][matrix.name].boxes
        ]
        regions = []
        for number, box in enumerate(self._indexes[source][matrix.name].boxes):
            remaining = [box.intersection(matrix.box)]
            for other in taken:
                remaining = [rest for region in remaining for rest in region.difference(other)]
            regions += [(number, region) for region in remaining if region.numel]
            taken.append(box)
        return regions

    def _find_overlapping(self, rank: int, name: str) -> list[int]:
        """Return the other ranks of a replica that hold some of the same elements, as with replicated rows."""
        key = rank, name
        if key not in self._overlapping:
            boxes = self._indexes[rank][name].boxes
            self._overlapping[key] = [
                other
                for other, index in enumerate(self._indexes)
                if other != rank
                and self._replicas[other] == self._replicas[rank]
                and name in index
                and any(_overlap(box, other_box) for box in boxes for other_box in index[name].boxes)
            ]
        return self._overlapping[key]


def _make_copy(name: str, region: Box, source: tuple[int, Box], destination: tuple[int, Box]) -> RegionCopy:
    """Return the copy of a region between two boxes, each given with its number."""
    (source_number, source_box), (destination_number, destination_box) = source, destination
    return RegionCopy(
        name,
        source_number,
        destination_number,
        region,
        region.to_slices(source_box),
        region.to_slices(destination_box),
    )


def _overlap(first: Box, second: Box) -> bool:
    """Return whether two boxes have an element in common. Faster than computing it: called for many pairs of ranks."""
    for start, size, other_start, other_size in zip(
        first.offsets, first.sizes, second.offsets, second.sizes, strict=True
    ):
        if not (start < other_start + other_size and other_start < start + size and size and other_size):
            return False
    return True


def list_matrices(tensor: TensorSlices) -> list[Matrix]:
    """Return the matrices of a tensor: with three dimensions it is a stack of them."""
    boxes = [Box.from_shape(tensor.shape)] if len(tensor.shape) == 2 else _split_stack(tensor.shape)
    return [Matrix(tensor.name, tensor.shape, box) for box in boxes]


def _split_stack(shape: tuple[int, ...]) -> list[Box]:
    return [Box((number, 0, 0), (1, *shape[1:])) for number in range(shape[0])]


def _find_holders(indexes: Sequence[StateIndex]) -> dict[Matrix, list[int]]:
    """Return the ranks that hold some element of each matrix."""
    ranks_of_index: dict[int, list[int]] = {}  # replicas have one and the same index object
    for rank, index in enumerate(indexes):
        ranks_of_index.setdefault(id(index), []).append(rank)
    holders: dict[str, list[tuple[Matrix, list[int]]]] = {}  # by name: hashing a matrix is slow
    for ranks in ranks_of_index.values():
        for tensor in indexes[ranks[0]].values():
            if tensor.name not in holders:
                holders[tensor.name] = [(matrix, []) for matrix in list_matrices(tensor)]
            for matrix, matrix_holders in holders[tensor.name]:
                if any(_overlap(box, matrix.box) for box in tensor.boxes):
                    matrix_holders += ranks
    return {
        matrix: sorted(matrix_holders)
        for entries in holders.values()
        for matrix, matrix_holders in entries
        if matrix_holders
    }


def assign_owners(holders: Mapping[Matrix, Sequence[int]]) -> dict[Matrix, int]:
    """Assign each matrix to one of its holders, so that costs are balanced: the most expensive first."""
    load: dict[int, int] = {}
    owners = {}
    for matrix in sorted(holders, key=_get_order):
        owner = min(holders[matrix], key=lambda rank: (load.get(rank, 0), rank))
        load[owner] = load.get(owner, 0) + matrix.cost
        owners[matrix] = owner
    return owners


def _get_order(matrix: Matrix) -> tuple[int, str, Box]:
    return -matrix.cost, matrix.name, matrix.box


def _number_boxes(matrices: Sequence[Matrix]) -> dict[Matrix, int]:
    """Return the position of each matrix among those of its tensor."""
    counts: Counter[str] = Counter()
    numbers = {}
    for matrix in matrices:
        numbers[matrix] = counts[matrix.name]
        counts[matrix.name] += 1
    return numbers
