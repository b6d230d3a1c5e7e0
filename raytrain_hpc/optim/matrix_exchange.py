"""Exchange of matrices between ranks, so that each is whole on one rank while an update of it is computed.

A matrix may be sharded over ranks, by rows, columns or both, and the shards replicated. It is assigned to one of the
ranks that hold a shard. That rank gathers the shards, preferably from its own replica of the state, computes, and
sends every rank the regions that it holds. The plan is made once per generation from the indexes of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.optim.newton_schulz import estimate_cost
from raytrain_hpc.state.reshard import Transfer, exchange_regions
from raytrain_hpc.state.shard_index import Box, RegionCopy, StateIndex, TensorSlices, plan_copies_from_ranks
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
class _Round:
    """Matrices that are whole at the same time, and the transfers that this rank takes part in."""

    own: list[Matrix] = field(default_factory=list)
    gathers: list[Transfer] = field(default_factory=list)
    scatters: list[Transfer] = field(default_factory=list)


class MatrixExchange:
    """Plan and execution of the exchange.

    `indexes`: by rank, the boxes of all matrices that it holds. `replicas`: by rank, the number of its replica of the
    state. `group`: all ranks, None if this rank is alone; `device`: where it communicates.
    """

    def __init__(
        self,
        indexes: Sequence[StateIndex],
        replicas: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ):
        self._indexes, self._replicas, self._rank = indexes, replicas, rank
        self._group, self._device = group, device
        self._holders = _find_holders(indexes)
        self.owners = assign_owners(self._holders)
        self._rounds = self._plan_rounds()

    def run(self, shards: ShardedState, compute: Callable[[list[Tensor]], None]) -> None:
        """Replace the matrices that all ranks hold as `shards` by the results of `compute`. Collective.

        `shards`: the local boxes, as in this rank's index. `compute` changes whole matrices, two-dimensional and
        contiguous, in place.
        """
        for current in self._rounds:
            wholes = self._allocate(current.own, shards)
            self._transfer(current.gathers, wholes, shards)
            compute([shard.tensor.view(shard.box.sizes[-2:]) for shard in wholes])
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

    def _plan_rounds(self) -> list[_Round]:
        """Plan rounds in which each rank has at most `_ROUND_ELEMENTS`, or one matrix. All ranks have equally many."""
        owned: dict[int, list[list[Matrix]]] = {}
        for matrix in sorted(self.owners, key=_get_order):
            rounds = owned.setdefault(self.owners[matrix], [[]])
            if rounds[-1] and sum(m.box.numel for m in rounds[-1]) + matrix.box.numel > _ROUND_ELEMENTS:
                rounds.append([])
            rounds[-1].append(matrix)
        plans = []
        for number in range(max(map(len, owned.values()), default=0)):
            current = _Round()
            for owner, rounds in owned.items():
                if number < len(rounds):
                    self._plan_owner(current, owner, rounds[number])
            plans.append(current)
        return plans

    def _plan_owner(self, current: _Round, owner: int, matrices: Sequence[Matrix]) -> None:
        """Add the transfers to and from one owner in which this rank takes part."""
        if owner == self._rank:
            current.own = list(matrices)
        wholes = _build_index(matrices)
        holders = sorted({rank for matrix in matrices for rank in self._holders[matrix]})
        if self._rank != owner and self._rank not in holders:
            return
        for source, copy in self._plan_gather(owner, wholes, holders):
            if self._rank in (source, owner):
                current.gathers.append(Transfer(source, owner, copy, 0))
        for rank in holders if self._rank == owner else [self._rank]:
            destination = self._indexes[rank].select(wholes)
            copies, _ = plan_copies_from_ranks([wholes], destination)
            current.scatters += [Transfer(owner, rank, copy, 0) for _, copy in copies]

    def _plan_gather(self, owner: int, wholes: StateIndex, holders: Sequence[int]) -> Iterator[tuple[int, RegionCopy]]:
        """Yield (source rank, copy) that make matrices whole on their owner: from itself, its replica, then others."""
        world = len(self._indexes)
        order = sorted(
            holders, key=lambda rank: (self._replicas[rank] != self._replicas[owner], (rank - owner) % world)
        )
        copies, _ = plan_copies_from_ranks([self._indexes[rank] for rank in order], wholes)
        for position, copy in copies:
            yield order[position], copy


def list_matrices(index: StateIndex) -> list[Matrix]:
    """Return the matrices of all tensors of an index: those with three dimensions are stacks."""
    matrices = []
    for tensor in index.values():
        whole = Box.from_shape(tensor.shape)
        boxes = [whole] if len(tensor.shape) == 2 else _split_stack(tensor.shape)
        matrices += [Matrix(tensor.name, tensor.shape, box) for box in boxes]
    return matrices


def _split_stack(shape: tuple[int, ...]) -> list[Box]:
    return [Box((number, 0, 0), (1, *shape[1:])) for number in range(shape[0])]


def _find_holders(indexes: Sequence[StateIndex]) -> dict[Matrix, list[int]]:
    """Return the ranks that hold some element of each matrix."""
    holders: dict[Matrix, list[int]] = {}
    matrices_of: dict[int, list[Matrix]] = {}  # replicas have one and the same index object
    for rank, index in enumerate(indexes):
        if id(index) not in matrices_of:
            matrices_of[id(index)] = [
                matrix
                for matrix in list_matrices(index)
                if any(box.intersection(matrix.box).numel for box in index[matrix.name].boxes)
            ]
        for matrix in matrices_of[id(index)]:
            holders.setdefault(matrix, []).append(rank)
    return holders


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


def _build_index(matrices: Sequence[Matrix]) -> StateIndex:
    """Return the index of whole matrices: their boxes by tensor, in the order given."""
    boxes: dict[str, list[Box]] = {}
    shapes = {matrix.name: matrix.shape for matrix in matrices}
    for matrix in matrices:
        boxes.setdefault(matrix.name, []).append(matrix.box)
    return StateIndex(TensorSlices(name, shapes[name], "float32", tuple(boxes[name])) for name in boxes)
