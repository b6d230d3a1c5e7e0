"""Audits of clipping and of the optimizer: what each rank will do is computed on copies, and on another rank too.

Nothing is applied before two ranks agree. Matrices that Muon orthogonalizes are in matrix_audits.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from raytrain_hpc.elastic.shard_holders import ParameterKind
from raytrain_hpc.optim.grad_norm import ExactGradientNorm, join_digits
from raytrain_hpc.optim.optimizer import Optimizer
from raytrain_hpc.parallel.computation_trace import ShardTraces, Trace
from raytrain_hpc.training.shard_recomputation import Inputs, Regions, ShardRecomputation, select

WEIGHT, GRADIENT = "weight", "gradient"


class UpdateAudits:
    """Auditor of clipping and updates on one rank."""

    def __init__(self, recomputation: ShardRecomputation, optimizer: Optimizer, norm: ExactGradientNorm):
        self._recomputation, self._optimizer, self._norm = recomputation, optimizer, norm
        # Not if another rank that holds the same shard counts it, as with expert parallelism.
        self._counts_own_regions = all(
            recomputation.regions.get(name, []) == norm.regions.get(name, []) for name in optimizer.weights
        )
        self._updated_names: list[str] = []  # of parameters, by the update that was traced last

    def compute_clipping(self, draw: int, scale: Tensor) -> dict[ParameterKind, ShardTraces]:
        """Trace norm and clipped gradients of this rank, and of another rank. Collective over all ranks.

        Call when the norm has been computed, before `scale` is applied. `draw`: see `choose_shift`.
        """

        measured: dict[Trace, list[Tensor]] = {}

        def compute(inputs: Inputs, regions: Regions, trace: Trace) -> None:
            if not self._is_finite:
                trace.add("contributed", "norm of gradients that is not finite", torch.zeros_like(scale))
                return
            gradients = select(inputs, GRADIENT)
            measured.setdefault(trace, []).append(self._norm.measure(gradients, regions))
            trace.add("contributed", "norm of gradients", measured[trace][-1])
            for name, gradient in gradients.items():
                trace.add("contributed", f"clipped gradient of {name}", gradient * scale.to(gradient.dtype))

        own = self._optimizer.get_gradients()
        traces = self._recomputation.run(draw, own, lambda name: {(GRADIENT, name): own[name]}, compute, in_pieces=True)
        if self._counts_own_regions:
            parts = [part for of_kind in traces.values() for part in measured.get(of_kind.own, ())]
        else:
            parts = [self._norm.measure(own, self._norm.regions)]
        # Of the sum of squares that is in the norm, modulo 2**64; 0 if there is none.
        error = join_digits(self._norm.contribution[1:]) - sum(join_digits(part[1:]) for part in parts)
        for number, of_kind in enumerate(traces.values()):
            of_kind.own.add("contributed", "sum of squares", error if number == 0 else torch.zeros_like(error))
            of_kind.other.add("contributed", "sum of squares", torch.zeros_like(error))
        return traces

    def is_norm_right(self, _: object) -> bool:
        """Return whether the norm is of what all ranks have contributed. Collective over the ranks that add it up."""
        return self._norm.is_total_right()

    @property
    def _is_finite(self) -> bool:
        """Whether the norm is. If not, gradients are dropped: the bits of a NaN may depend on the kernel."""
        return math.isfinite(self._norm.limit)

    def trace_reduced_gradients(self, hashes: Mapping[str, Tensor]) -> dict[ParameterKind, ShardTraces]:
        """Return traces of the reduced gradients of this rank, given by their hashes, to compare it with its copies."""
        traces = self._recomputation.make_traces()
        for name, value in hashes.items():
            trace = traces[self._recomputation.get_kind(name)].own
            trace.add_hash("received", f"reduced gradient of {name}", value)
        return traces

    def trace_gradients(self) -> Trace:
        """Trace the gradients of this rank, which have been clipped."""
        trace = Trace()
        for name, gradient in self._optimizer.get_gradients().items() if self._is_finite else ():
            for piece in self._recomputation.split({(GRADIENT, name): gradient}):
                trace.add("contributed", f"clipped gradient of {name}", piece[GRADIENT, name])
        return trace

    def compute_update(self, draw: int, lr: float) -> dict[ParameterKind, ShardTraces]:
        """Trace the state after an update by the current gradients, of this rank and of another one. Collective.

        Nothing is changed. `draw`: see `choose_shift`.
        """

        def compute(inputs: Inputs, regions: Regions, trace: Trace) -> None:
            self._update_copy(inputs, lr, trace)

        gradients, weights = self._optimizer.get_gradients(), self._optimizer.weights
        names = self._updated_names = [name for name in gradients if name not in self._optimizer.matrix_names]

        def get_inputs(name: str) -> Inputs:
            return {(GRADIENT, name): gradients[name], **self._get_state(name, weights[name])}

        in_pieces = self._optimizer.is_elementwise
        return self._recomputation.run(draw, names, get_inputs, compute, in_pieces=in_pieces)

    def trace_state(self, trace: Trace) -> None:
        """Add the state of the parameters of this rank after the update to a trace."""
        weights = self._optimizer.weights
        for name in self._updated_names:
            state = self._get_state(name, weights[name])
            for piece in self._recomputation.split(state) if self._optimizer.is_elementwise else (state,):
                trace_results(trace, piece)
        self._optimizer.release_memory()

    def _get_state(self, name: str, weight: Tensor) -> dict[tuple[str, str], Tensor]:
        """Return what an update of a parameter changes."""
        states = (*self._optimizer.moments.items(), *self._optimizer.other_state.items())
        return {(WEIGHT, name): weight} | {(kind, name): of_kind[name] for kind, of_kind in states if name in of_kind}

    def _update_copy(self, inputs: Inputs, lr: float, trace: Trace) -> None:
        copies = copy_inputs(inputs, get_moment_device(self._optimizer))
        weights = select(copies, WEIGHT)
        optimizer = self._optimizer.make_temporary(weights)
        results: dict[tuple[str, str], Tensor] = {(WEIGHT, name): weight for name, weight in weights.items()}
        for kind, of_kind in (*optimizer.moments.items(), *optimizer.other_state.items()):
            for name, tensor in of_kind.items():
                results[kind, name] = tensor.copy_(copies[kind, name])
        optimizer.apply(select(copies, GRADIENT), lr)
        trace_results(trace, results)


def get_moment_device(optimizer: Optimizer) -> torch.device | None:
    """Return the device on which an optimizer computes updates; None if it has no moments."""
    return next((moment.device for moments in optimizer.moments.values() for moment in moments.values()), None)


def copy_inputs(inputs: Inputs, device: torch.device | None) -> dict[tuple[str, str], Tensor]:
    """Return copies of tensors, on a device if one is given."""
    return {key: tensor.to(device or tensor.device, copy=True) for key, tensor in inputs.items()}


def trace_results(trace: Trace, results: Inputs) -> None:
    """Add tensors to a trace, labelled by what they are and the parameter."""
    for (what, name), tensor in results.items():
        trace.add("contributed", f"{what} of {name}", tensor)
