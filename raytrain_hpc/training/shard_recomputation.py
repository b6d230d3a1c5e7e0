"""Computation for the shards of two ranks, this one and another one, on copies of their inputs, for audits.

A shard that several ranks hold is computed by all of them anyway. One that ZeRO gives to a single rank is sent to
another one, in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.elastic.shard_holders import ParameterKind, ShardHolders, choose_shift
from raytrain_hpc.optim.grad_norm import Region
from raytrain_hpc.parallel.computation_trace import ShardTraces, Trace
from raytrain_hpc.training.rank_exchange import exchange_tensors

_PART_BYTES = 256 << 20  # of inputs that are sent and copied at a time

Inputs = Mapping[tuple[str, str], Tensor]  # by what it is (weight, gradient, or a kind of state) and parameter
Regions = Mapping[str, Sequence[Region]]
Compute = Callable[[Inputs, Regions, Trace], None]  # (inputs, regions, trace that gets the results)


class ShardRecomputation:
    """Computation for the parameters of this rank and of another one.

    `regions`: what the first rank that holds the same shard counts of each gradient in the norm. `expert_names`:
    parameters that are sharded as experts are.
    """

    def __init__(self, context: ParallelContext, regions: Regions, expert_names: Iterable[str]):
        self._context, self.regions = context, regions
        self._holders, self._expert_names = ShardHolders(context.layout), frozenset(expert_names)

    def run(
        self, draw: int, names: Iterable[str], get_inputs: Callable[[str], Inputs], compute: Compute
    ) -> dict[ParameterKind, ShardTraces]:
        """Trace what `compute` makes of inputs, by kind of parameters. Collective over all ranks.

        `draw`: see `choose_shift`. `names`: parameters of this rank; the other one has the same. `compute` must not
        change its inputs.
        """
        names_by_kind: dict[ParameterKind, list[str]] = {kind: [] for kind in self._holders.kinds}
        for name in names:
            names_by_kind[self.get_kind(name)].append(name)
        traces = self.make_traces(draw)
        for kind, of_kind in names_by_kind.items():
            parts = list(_split_into_parts(of_kind, get_inputs))
            num_parts = self._find_maximum(len(parts)) if traces[kind].shard_shift else len(parts)
            for number in range(num_parts):
                part = parts[number] if number < len(parts) else []
                inputs = {key: tensor for name in part for key, tensor in get_inputs(name).items()}
                regions = {name: self.regions[name] for name in part if name in self.regions}
                if part:
                    compute(inputs, regions, traces[kind].own)
                self._compute_other(kind, inputs, regions, traces[kind], compute)
        return traces

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


def _split_into_parts(names: Sequence[str], get_inputs: Callable[[str], Inputs]) -> Iterator[list[str]]:
    """Yield names whose inputs have about `_PART_BYTES` together."""
    part, size = list[str](), 0
    for name in names:
        part.append(name)
        size += sum(tensor.nbytes for tensor in get_inputs(name).values())
        if size >= _PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
