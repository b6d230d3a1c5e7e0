"""Audits of clipping and of the optimizer: another rank computes both again, from the inputs of the holder of a shard.

A shard that several ranks hold is computed by all of them anyway. One that ZeRO gives to a single rank is sent to
another one, in parts. All compute on copies, so that nothing is applied before they agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.elastic.shard_holders import ParameterKind, ShardHolders, choose_shift
from raytrain_hpc.optim.grad_norm import ExactGradientNorm, Region
from raytrain_hpc.optim.optimizer import Optimizer
from raytrain_hpc.parallel.computation_trace import ShardTraces, Trace
from raytrain_hpc.training.rank_exchange import exchange_tensors

_PART_BYTES = 256 << 20  # of inputs that are sent and copied at a time
_WEIGHT, _GRADIENT = "weight", "gradient"

Inputs = Mapping[tuple[str, str], Tensor]  # by what it is (weight, gradient, or a kind of state) and parameter
Regions = Mapping[str, Sequence[Region]]
Compute = Callable[[Inputs, Regions, Trace], None]  # (inputs, regions, trace that gets the results)


class UpdateAudits:
    """Auditor of clipping and updates on one rank.

    `regions`: what the first rank that holds the same shard counts of each gradient in the norm. `expert_names`:
    parameters that are sharded as experts are.
    """

    def __init__(
        self,
        context: ParallelContext,
        optimizer: Optimizer,
        norm: ExactGradientNorm,
        regions: Regions,
        expert_names: Iterable[str],
    ):
        self._context, self._optimizer, self._norm, self._regions = context, optimizer, norm, regions
        self._holders, self._expert_names = ShardHolders(context.layout), frozenset(expert_names)
        self._updated_names: list[str] = []  # of parameters, by the update that was traced last

    def compute_clipping(self, draw: int, scale: Tensor) -> dict[ParameterKind, ShardTraces]:
        """Trace norm and clipped gradients of this rank, and of other ranks. Collective over all ranks.

        Call when the norm has been computed, before `scale` is applied. `draw`: see `choose_shift`.
        """

        def compute(inputs: Inputs, regions: Regions, trace: Trace) -> None:
            if not self._is_finite:
                trace.add("contributed", "norm of gradients that is not finite", torch.zeros_like(scale))
                return
            gradients = {name: gradient for (_, name), gradient in inputs.items()}
            trace.add("contributed", "norm of gradients", self._norm.measure(gradients, regions))
            for name, gradient in gradients.items():
                trace.add("contributed", f"clipped gradient of {name}", gradient * scale.to(gradient.dtype))

        own = self._optimizer.get_gradients()
        traces = self._compute(draw, own, lambda name: {(_GRADIENT, name): own[name]}, compute)
        error = self._norm.squares - self._norm.measure(own, self._norm.regions)[1:]
        for number, of_kind in enumerate(traces.values()):
            of_kind.own.add("contributed", "sum of squares", error if number == 0 else torch.zeros_like(error))
            of_kind.other.add("contributed", "sum of squares", torch.zeros_like(error))
        return traces

    @property
    def _is_finite(self) -> bool:
        """Whether the norm is. If not, gradients are dropped: the bits of a NaN may depend on the kernel."""
        return math.isfinite(self._norm.limit)

    def trace_gradients(self) -> Trace:
        """Trace the gradients of this rank, which have been clipped."""
        trace = Trace()
        for name, gradient in self._optimizer.get_gradients().items() if self._is_finite else ():
            trace.add("contributed", f"clipped gradient of {name}", gradient)
        return trace

    def compute_update(self, draw: int, lr: float) -> dict[ParameterKind, ShardTraces]:
        """Trace the state after an update by the current gradients, of this rank and of others. Collective.

        Nothing is changed. `draw`: see `choose_shift`.
        """

        def compute(inputs: Inputs, regions: Regions, trace: Trace) -> None:
            self._update_copy(inputs, lr, trace)

        gradients, weights = self._optimizer.get_gradients(), self._optimizer.weights
        names = self._updated_names = [name for name in gradients if name not in self._optimizer.matrix_names]

        def get_inputs(name: str) -> Inputs:
            return {(_GRADIENT, name): gradients[name], **self._get_state(name, weights[name])}

        return self._compute(draw, names, get_inputs, compute)

    def trace_state(self) -> Trace:
        """Trace the state of the parameters of this rank after the update."""
        trace, weights = Trace(), self._optimizer.weights
        for name in self._updated_names:
            _trace_results(trace, self._get_state(name, weights[name]))
        self._optimizer.release_memory()
        return trace

    def _get_state(self, name: str, weight: Tensor) -> dict[tuple[str, str], Tensor]:
        """Return what an update of a parameter changes."""
        states = (*self._optimizer.moments.items(), *self._optimizer.other_state.items())
        return {(_WEIGHT, name): weight} | {(kind, name): of_kind[name] for kind, of_kind in states if name in of_kind}

    def _update_copy(self, inputs: Inputs, lr: float, trace: Trace) -> None:
        moments = next(iter(self._optimizer.moments.values()), {})
        device = next((moment.device for moment in moments.values()), self._context.device)
        copies = {key: tensor.to(device, copy=True) for key, tensor in inputs.items()}
        weights = {name: copy for (what, name), copy in copies.items() if what == _WEIGHT}
        optimizer = self._optimizer.make_temporary(weights)
        results: dict[tuple[str, str], Tensor] = {(_WEIGHT, name): weight for name, weight in weights.items()}
        for kind, of_kind in (*optimizer.moments.items(), *optimizer.other_state.items()):
            for name, tensor in of_kind.items():
                results[kind, name] = tensor.copy_(copies[kind, name])
        optimizer.apply({name: copy for (what, name), copy in copies.items() if what == _GRADIENT}, lr)
        _trace_results(trace, results)

    def _compute(
        self,
        draw: int,
        names: Iterable[str],
        get_inputs: Callable[[str], Inputs],
        compute: Compute,
    ) -> dict[ParameterKind, ShardTraces]:
        """Compute the results of this rank's parameters of each kind, and of those of another rank."""
        names_by_kind: dict[ParameterKind, list[str]] = {kind: [] for kind in self._holders.kinds}
        for name in names:
            is_expert = name in self._expert_names and "experts" in names_by_kind
            names_by_kind["experts" if is_expert else "dense"].append(name)
        traces = dict[ParameterKind, ShardTraces]()
        for kind, of_kind in names_by_kind.items():
            traces[kind] = ShardTraces(choose_shift(draw, self._holders.count_shards(kind)))
            parts = list(_split_into_parts(of_kind, get_inputs))
            num_parts = self._find_maximum(len(parts)) if traces[kind].shard_shift else len(parts)
            for number in range(num_parts):
                part = parts[number] if number < len(parts) else []
                inputs = {key: tensor for name in part for key, tensor in get_inputs(name).items()}
                regions = {name: self._regions[name] for name in part if name in self._regions}
                if part:
                    compute(inputs, regions, traces[kind].own)
                self._compute_other(kind, inputs, regions, traces[kind], compute)
        return traces

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


def _trace_results(trace: Trace, results: Inputs) -> None:
    for (what, name), tensor in results.items():
        trace.add("contributed", f"{what} of {name}", tensor)


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
