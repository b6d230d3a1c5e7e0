"""Audits of the matrices of Muon: each is orthogonalized by two of the ranks that hold it, from the same momentum.

Momenta and weights are element-wise, and audited like the state of other parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.elastic.audit_verdict import Computation, Finding, find_faults, judge, merge_findings
from raytrain_hpc.elastic.shard_holders import ParameterKind
from raytrain_hpc.optim.matrix_exchange import Matrix, MatrixExchange
from raytrain_hpc.optim.muon import Muon
from raytrain_hpc.optim.optimizer import MOMENT_NAMES
from raytrain_hpc.parallel.computation_trace import ShardTraces, Trace
from raytrain_hpc.state.tensor_hash import compute_hash
from raytrain_hpc.training.shard_recomputation import Inputs, Regions, ShardRecomputation, select
from raytrain_hpc.training.update_audits import GRADIENT, WEIGHT, copy_inputs, get_moment_device, trace_results

_MOMENTUM, _UPDATE = MOMENT_NAMES["muon"][0], "update"


class MatrixAudits:
    """Auditor of the matrices of one rank. The calls follow each other; all are collective over all ranks."""

    def __init__(self, recomputation: ShardRecomputation, optimizer: Muon, context: ParallelContext):
        self._recomputation, self._optimizer, self._context = recomputation, optimizer, context
        self._exchanges: dict[int, MatrixExchange] = {}
        self._updates: dict[str, Tensor] = {}  # of this step, before orthogonalization
        self._orthogonal: dict[str, Tensor] = {}

    def compute_momenta(self, draw: int) -> dict[ParameterKind, ShardTraces]:
        """Trace momenta and updates by the current gradients, of this rank and of another one.

        `draw`: see `choose_shift`.
        """
        optimizer, gradients = self._optimizer, self._optimizer.get_gradients()
        momenta, weights, self._updates = optimizer.moments[_MOMENTUM], optimizer.weights, {}

        def get_inputs(name: str) -> Inputs:
            given = {(GRADIENT, name): gradients[name]} if name in gradients else {}
            return {(_MOMENTUM, name): momenta[name], **given}

        def compute(inputs: Inputs, regions: Regions, trace: Trace) -> None:
            copies = copy_inputs(inputs, get_moment_device(optimizer))
            moments = select(copies, _MOMENTUM)
            slices = {
                name: moment.new_empty(moment.shape, dtype=weights[name].dtype) for name, moment in moments.items()
            }
            storage = optimizer.make_temporary_momenta(slices)
            for name, momentum in storage.moments[_MOMENTUM].items():
                momentum.copy_(copies[_MOMENTUM, name])
            updates = optimizer.advance_momenta(storage, select(copies, GRADIENT))
            trace_results(trace, {(_MOMENTUM, name): moment for name, moment in storage.moments[_MOMENTUM].items()})
            trace_results(trace, {(_UPDATE, name): update for name, update in updates.items()})
            if all(inputs[_MOMENTUM, name] is momenta.get(name) for name in updates):  # not those of the other rank
                device = self._context.device
                self._updates |= {name: update.to(device) for name, update in updates.items()}

        return self._recomputation.run(draw, list(momenta), get_inputs, compute, in_pieces=False)

    def orthogonalize(self, num_attempts: int) -> list[Finding]:
        """Orthogonalize the updates, and return who has computed a matrix wrong. `num_attempts`: if results differ."""
        computations: dict[str, list[Computation]] = {}
        for attempt in range(num_attempts):
            (own, self._orthogonal), (other, _) = self._run(None), self._run(attempt % 2)
            gathered = [(own, other)] * self._context.layout.world_size
            if self._context.world_group is not None:
                dist.all_gather_object(gathered, (own, other), group=self._context.world_group)
            if not self._add(computations, gathered) and attempt == 0:
                break
        self._updates = {}
        return self._find_faults(computations)

    def _add(
        self, computations: dict[str, list[Computation]], gathered: Sequence[tuple[dict[str, int], dict[str, int]]]
    ) -> bool:
        """Add an attempt by the hashes of all ranks, and return whether two of its results differ."""
        attempt: dict[str, list[Computation]] = {}
        for number in (0, 1):
            for rank, of_rank in enumerate(gathered):
                for key, value in of_rank[number].items():
                    attempt.setdefault(key, []).append(Computation(rank, ((rank, 0),), value))
        for key, of_key in attempt.items():
            computations.setdefault(key, []).extend(of_key)
        return any(len({made.signature for made in of_key}) > 1 for of_key in attempt.values())

    def compute_weights(self, draw: int, lr: float) -> dict[ParameterKind, ShardTraces]:
        """Trace the weights after the orthogonal updates, of this rank and of another one. `draw`: `choose_shift`."""
        optimizer, weights, updates = self._optimizer, self._optimizer.weights, self._orthogonal

        def compute(inputs: Inputs, regions: Regions, trace: Trace) -> None:
            copies = copy_inputs(inputs, None)
            changed = select(copies, WEIGHT)
            optimizer.change_matrices(changed, select(copies, _UPDATE), lr)
            trace_results(trace, {(WEIGHT, name): weight for name, weight in changed.items()})

        def get_inputs(name: str) -> Inputs:
            return {(WEIGHT, name): weights[name], (_UPDATE, name): updates[name]}

        return self._recomputation.run(draw, list(updates), get_inputs, compute, in_pieces=False)

    def trace_state(self, trace: Trace) -> None:
        """Add the state of the matrices of this rank after the update to a trace."""
        weights, momenta = self._optimizer.weights, self._optimizer.moments[_MOMENTUM]
        for name in self._orthogonal:
            trace_results(trace, {(WEIGHT, name): weights[name], (_MOMENTUM, name): momenta[name]})
        self._orthogonal = {}

    def _run(self, draw: int | None) -> tuple[dict[str, int], dict[str, Tensor]]:
        """Orthogonalize a copy of the updates. Return hashes of the matrices of this rank, and the copy.

        `draw`: None lets the same ranks do it as in a step.
        """
        updates = {name: update.clone() for name, update in self._updates.items()}
        exchange = self._optimizer.exchange
        if draw is not None:
            if draw not in self._exchanges:
                self._exchanges[draw] = exchange.move_owners(draw)
            exchange = self._exchanges[draw]
        hashes: dict[str, int] = {}

        def inspect(matrix: Matrix, result: Tensor) -> None:
            hashes[f"{matrix.name} {matrix.box}"] = int(compute_hash(result))

        self._optimizer.orthogonalize(updates, exchange, inspect)
        return hashes, updates

    def _find_faults(self, computations: dict[str, list[Computation]]) -> list[Finding]:
        findings = list[Finding]()
        for key, of_key in sorted(computations.items()):
            if len({made.signature for made in of_key}) > 1:
                traces = [[[("contributed", key.split()[0], made.signature)]] for made in of_key]
                findings += find_faults("orthogonal matrices", of_key, judge(of_key), traces)  # type: ignore[arg-type]
        return merge_findings(findings)
