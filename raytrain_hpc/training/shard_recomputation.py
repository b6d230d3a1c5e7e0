"""Computation for the shards of two ranks, this one and another one, on copies of their inputs, for audits.

A shard that several ranks hold is computed by all of them anyway. One that ZeRO gives to a single rank is sent to
another one, in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.elastic.shard_holders import ParameterKind, ShardHolders, choose_shift
from raytrain_hpc.optim.grad_norm import Region
from raytrain_hpc.parallel.computation_trace import ShardTraces, Trace
from raytrain_hpc.planner.memory_model import AUDIT_PART_BYTES
from raytrain_hpc.training.rank_exchange import exchange_tensors

PART_BYTES = AUDIT_PART_BYTES  # of inputs that are sent and copied at a time
PIECE_ELEMENTS = 16 << 20  # of a parameter: 256 MiB with its gradient and two moments in fp32

Inputs = Mapping[tuple[str, str], Tensor]  # by what it is (weight, gradient, or a kind of state) and parameter
Regions = Mapping[str, Sequence[Region]]
Compute = Callable[[Inputs, Regions, Trace], None]  # (inputs, regions, trace that gets the results)


class _Piece(NamedTuple):
    """Rows of a parameter, None: all of it. `nbytes`: of its inputs."""

    name: str
    rows: slice | None
    nbytes: int


class ShardRecomputation:
    """Computation for the parameters of this rank and of another one.

    `regions`: what the first rank that holds the same shard counts of each gradient in the norm. `expert_names`:
    parameters that are sharded as experts are.
    """

    def __init__(self, context: ParallelContext, regions: Regions, expert_names: Iterable[str]):
        self._context, self.regions = context, regions
        self._holders, self._expert_names = ShardHolders(context.layout), frozenset(expert_names)

    def run(
        self,
        draw: int,
        names: Iterable[str],
        get_inputs: Callable[[str], Inputs],
        compute: Compute,
        *,
        in_pieces: bool,
    ) -> dict[ParameterKind, ShardTraces]:
        """Trace what `compute` makes of inputs, by kind of parameters. Collective over all ranks.

        `draw`: see `choose_shift`. `names`: parameters of this rank; the other one has the same. `compute` must not
        change its inputs. `in_pieces`: it is element-wise, and gets large parameters as their `split`.
        """
        names_by_kind: dict[ParameterKind, list[str]] = {kind: [] for kind in self._holders.kinds}
        for name in names:
            names_by_kind[self.get_kind(name)].append(name)
        traces = self.make_traces(draw)
        for kind, of_kind in names_by_kind.items():
            parts = list(_join_pieces(self._list_pieces(of_kind, get_inputs, in_pieces=in_pieces)))
            num_parts = self._find_maximum(len(parts)) if traces[kind].shard_shift else len(parts)
            for number in range(num_parts):
                inputs, regions = self._read(parts[number] if number < len(parts) else [], get_inputs)
                if inputs:
                    compute(inputs, regions, traces[kind].own)
                self._compute_other(kind, inputs, regions, traces[kind], compute)
        return traces

    def split(self, inputs: Inputs) -> Iterator[Inputs]:
        """Yield the pieces of tensors of a parameter, all of its shape, in which `compute` gets them."""
        for rows in self._list_rows(next(iter(inputs.values())).shape):
            yield {key: _select_rows(tensor, rows) for key, tensor in inputs.items()}

    def _read(self, part: Sequence[_Piece], get_inputs: Callable[[str], Inputs]) -> tuple[Inputs, Regions]:
        """Return the inputs of some pieces, and what of their gradients is counted in the norm."""
        inputs, regions = dict[tuple[str, str], Tensor](), dict[str, Sequence[Region]]()
        for name, rows, _ in part:
            inputs |= {key: _select_rows(tensor, rows) for key, tensor in get_inputs(name).items()}
            if name in self.regions:
                regions[name] = _narrow(self.regions[name], rows)
        return inputs, regions

    def _list_pieces(
        self, names: Iterable[str], get_inputs: Callable[[str], Inputs], *, in_pieces: bool
    ) -> Iterator[_Piece]:
        for name in names:
            tensors = list(get_inputs(name).values())
            nbytes, shape = sum(tensor.nbytes for tensor in tensors), tensors[0].shape
            for rows in self._list_rows(shape) if in_pieces else [None]:
                yield _Piece(name, rows, nbytes if rows is None else nbytes * (rows.stop - rows.start) // shape[0])

    def _list_rows(self, shape: torch.Size) -> list[slice | None]:
        """Return the rows of each piece of a parameter; None: all."""
        if shape.numel() <= PIECE_ELEMENTS:
            return [None]
        step = max(1, PIECE_ELEMENTS // shape[1:].numel())
        return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]

    def get_kind(self, name: str) -> ParameterKind:
        """Return the kind of a parameter."""
        return "experts" if name in self._expert_names and "experts" in self._holders.kinds else "dense"

    def make_traces(self, draw: int | None = None) -> dict[ParameterKind, ShardTraces]:
        """Return empty traces. `draw`: chooses the other rank, see `choose_shift`; None: there is none."""
        return {
            kind: ShardTraces(0 if draw is None else choose_shift(draw, self._holders.count_shards(kind)))
            for kind in self._holders.kinds
        }

    def _compute_other(
        self, kind: ParameterKind, inputs: Inputs, regions: Regions, traces: ShardTraces, compute: Compute
    ) -> None:
        """Send inputs to the rank that computes them again, and compute those that another rank has sent."""
        if not traces.shard_shift:
            return
        destination, source = (
            self._holders.move(kind, self._context.rank, shift) for shift in (-traces.shard_shift, traces.shard_shift)
        )
        received, received_regions = exchange_tensors(inputs, regions, destination, source, self._context.device)
        if received:
            compute(received, received_regions, traces.other)

    def _find_maximum(self, value: int) -> int:
        maximum = torch.tensor(value, device=self._context.device)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self._context.world_group)
        return int(maximum)


def select(inputs: Inputs, what: str) -> dict[str, Tensor]:
    """Return the tensors of one kind, by parameter."""
    return {name: tensor for (kind, name), tensor in inputs.items() if kind == what}


def _join_pieces(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Yield pieces whose inputs have at most `PART_BYTES` together, or one that has more."""
    part, size = list[_Piece](), 0
    for piece in pieces:
        if part and (size + piece.nbytes > PART_BYTES or part[-1].name == piece.name):
            yield part
            part, size = [], 0
        part.append(piece)
        size += piece.nbytes
    if part:
        yield part


def _select_rows(tensor: Tensor, rows: slice | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def _narrow(regions: Sequence[Region], rows: slice | None) -> Sequence[Region]:
    """Return what regions of a tensor are in some of its rows, as regions of these."""
    if rows is None:
        return regions
    narrowed = list[Region]()
    for region in regions:
        if region is None:
            narrowed.append(None)
            continue
        first, last = max(region[0].start, rows.start), min(region[0].stop, rows.stop)
        if first < last:
            narrowed.append((slice(first - rows.start, last - rows.start), *region[1:]))
    return narrowed
