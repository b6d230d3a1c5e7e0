"""Audits of steps: what a rank computes and keeps is compared with what another rank computes from the same inputs.

A step that is audited is applied only if its passes, the sums of its gradients, their norm and the update have the same
bits on two ranks each, and if no bit of what it reads has changed in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from raytrain_hpc.distributed.handshake import PeerInfo
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.elastic.audit_schedule import AuditSchedule, choose_interval, count_ranks_per_unit
from raytrain_hpc.elastic.audit_verdict import Entry, Finding, find_first_difference
from raytrain_hpc.elastic.shard_holders import ParameterKind, ShardHolders
from raytrain_hpc.elastic.spare_audit_schedule import build_spare_schedule, list_more_audits
from raytrain_hpc.errors import CallbackError, ConfigError
from raytrain_hpc.optim.grad_norm import ExactGradientNorm, Region
from raytrain_hpc.optim.muon import Muon
from raytrain_hpc.parallel.computation_trace import ShardTraces, Trace
from raytrain_hpc.parallel.expert_parallel import get_expert_parameters
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.training.data_builder import Loader
from raytrain_hpc.training.forward_backward import ForwardBackward
from raytrain_hpc.training.loss_reduction import StepTotals
from raytrain_hpc.training.matrix_audits import MatrixAudits
from raytrain_hpc.training.memory_audits import MemoryAudits, StateChangedError, gather_texts
from raytrain_hpc.training.model_update import ModelUpdate
from raytrain_hpc.training.pass_audits import MAX_ATTEMPTS, AuditMismatchError, PassAudits, ReadMicrobatch
from raytrain_hpc.training.shard_computations import ShardComputations
from raytrain_hpc.training.shard_recomputation import ShardRecomputation
from raytrain_hpc.training.spare_samples import SpareSamples
from raytrain_hpc.training.state_builder import find_norm_regions, list_persistent_buffers
from raytrain_hpc.training.total_audits import TotalAudits
from raytrain_hpc.training.traced_passes import TracedPasses
from raytrain_hpc.training.update_audits import UpdateAudits


def build_audits(
    spec: WorkerSpec,
    context: ParallelContext,
    model: ParallelModel,
    model_step: ForwardBackward,
    model_update: ModelUpdate,
    loader: Loader,
    state: ShardedState,
    peer_info: PeerInfo,
    control: ControlChannel,
    emit: Callable[[Record], None],
) -> StepAudits | None:
    """Return the auditor of a rank's steps, or None if no step is audited. `emit`: discards records but on one rank."""
    microbatches, norm = tuple(spec.batching.split_by_rank(spec.layout.dp_size)), model_update.gradient_norm
    interval = choose_interval(spec.config.fault.audit_interval, microbatches)
    if not interval or not isinstance(norm, ExactGradientNorm):
        return None
    more_steps = list_more_audits(spec.start_step, spec.disputed_step)
    ranks_per_unit = count_ranks_per_unit(spec.layout)
    schedule = AuditSchedule(interval, spec.config.run.seed, microbatches, ranks_per_unit, more_steps)
    report, optimizer = partial(_report, emit), model_update.optimizer
    traced_passes = TracedPasses(context, model, model_step, optimizer.zero_grad)
    passes = PassAudits(schedule, context, traced_passes, loader, partial(_is_aborted, control), report)
    buffers = {f"model.{name}" for name, _ in list_persistent_buffers(model)}
    memory = MemoryAudits(state, buffers, optimizer.get_gradients, optimizer.release_memory, context.device)
    experts = get_expert_parameters(model.modules.values())
    regions = _find_regions_of_first_holders(model, peer_info.destination_indexes, context, experts)
    recomputation = ShardRecomputation(context, regions, experts)
    matrices = MatrixAudits(recomputation, optimizer, context) if isinstance(optimizer, Muon) else None
    update = UpdateAudits(recomputation, optimizer, norm)
    spare_schedule = build_spare_schedule(spec.config, spec.layout, schedule)
    control.samples.clear(spec.disputed_step or 0)
    make_samples = partial(SpareSamples, generation=spec.generation, has_buffers=bool(buffers))
    samples = make_samples(spare_schedule, context, traced_passes, state, loader, control.samples)
    totals = TotalAudits(context, passes.raise_if_aborted, report)
    return StepAudits(schedule, passes, memory, totals, update, matrices, samples, context, report)


def _find_regions_of_first_holders(
    model: ParallelModel, indexes: list[StateIndex], context: ParallelContext, experts: Iterable[str]
) -> dict[str, list[Region]]:
    """Return what the first rank that holds the same shard as this one counts of each gradient in the norm.

    That is what this rank counts, unless the ranks that hold a shard belong to one replica of the state.
    """
    ranks, holders, regions = context.get_state_ranks(), ShardHolders(context.layout), dict[str, list[Region]]()
    expert_names = set(experts) if "experts" in holders.kinds else set()
    for kind in holders.kinds:
        first = holders.find_first(kind, context.rank)
        names = [name for name in model.parameters if (name in expert_names) == (kind == "experts")]
        regions |= find_norm_regions(model, names, indexes, ranks, first if first in ranks else context.rank)
    return regions


@dataclass
class StepAudits:
    """Auditor of the steps that are due. `report`: takes transient faults, which all ranks find alike."""

    schedule: AuditSchedule
    passes: PassAudits
    memory: MemoryAudits
    totals: TotalAudits
    update: UpdateAudits
    matrices: MatrixAudits | None  # with Muon only
    samples: SpareSamples
    context: ParallelContext
    report: Callable[[int, Finding, float], None]
    _audited_step: int = -1  # whose passes have run last
    _step_with_changed_gradients: int = -1
    _clipped: Mapping[ParameterKind, ShardTraces] = field(default_factory=dict)  # traces that two ranks agree on
    _updated: list[Mapping[ParameterKind, ShardTraces]] = field(default_factory=list)
    _gradients: tuple[int, ShardComputations] | None = None  # of a step whose copies differed, and that step
    _wrongly_updated: str | None = None  # the first tensor of this rank that differs from what was verified

    def is_due(self, step: int) -> bool:
        """Return whether the step after `step` committed ones is audited."""
        return self.schedule.is_due(step)

    def is_verified(self, step: int) -> bool:
        """Return whether the step after `step` committed ones is audited by another rank than the owner."""
        return self.is_due(step) and self.schedule.has_other_ranks

    def check_determinism(self, step: int, read: ReadMicrobatch) -> None:
        """Compute a microbatch twice on each rank: audits need the same bits. Collective over all ranks.

        Call before the first step. Raises ConfigError if they differ again and again on all data-parallel ranks, and
        AuditMismatchError if they do on some.
        """
        for _ in range(MAX_ATTEMPTS):
            different = gather_texts(self.passes.find_own_difference(step, read), self.context)
            if not different:
                return
        layout, by_place = self.context.layout, dict[tuple[int, ...], set[bool]]()
        for rank in range(layout.world_size):
            coordinates = layout.get_coordinates(rank)
            place = coordinates["pp"], coordinates["cp"], coordinates["tp"]
            by_place.setdefault(place, set()).add(rank in different)
        if {True} in by_place.values():  # all ranks that run the same code
            key, interval = "fault.audit_interval", self.schedule.interval
            first = min(different)
            raise ConfigError(
                key,
                interval,
                "",
                "two computations of a microbatch have different bits on all data-parallel ranks (on rank "
                f"{first}: {different[first]} first); remove what is random or not deterministic from the model, or "
                "set it to 0",
            )
        findings = [
            Finding(rank, "a microbatch", name, "compute", is_persistent=True) for rank, name in different.items()
        ]
        raise AuditMismatchError(step, findings)

    def run_passes(self, step: int, train: Callable[[bool], Tensor], read: ReadMicrobatch) -> Tensor:
        """Run the passes of an audited step by `train`; see `PassAudits.run`. Collective over all ranks.

        Raises StateChangedError on all ranks if the state of one has changed since the last step.
        """
        is_repeated, self._audited_step = step == self._audited_step, step
        self._raise_if_changed(step, self.memory.find_changed_state(after_passes=is_repeated))
        losses = self.passes.run(step, train, read)
        self.memory.record_gradients()
        return losses

    def run_other_passes(self, step: int, train: Callable[[bool], Tensor], read: ReadMicrobatch) -> Tensor:
        """Run the passes of a step that is not audited by `train`, with a sample for spares if that is due."""
        run = partial(train, False)
        return self.samples.run_passes(step, run, read) if self.samples.is_due(step) else run()

    def reduce_losses(
        self, step: int, reduce: Callable[[], StepTotals], is_right: Callable[[StepTotals], bool]
    ) -> StepTotals:
        """Return what `reduce` returns, sums of losses and token counts over all ranks, verified by `is_right`.

        Collective over all ranks. Raises as `TotalAudits.compute` does.
        """
        ranks = range(self.context.layout.world_size)
        return self.totals.compute(step, "the sums of losses and token counts", reduce, is_right, ranks)

    def reduce_loads(
        self, step: int, reduce: Callable[[], Tensor], is_right: Callable[[Tensor], bool], ranks: Sequence[int]
    ) -> Tensor:
        """Return what `reduce` returns, sums over `ranks` of the loads of experts. As `reduce_losses` otherwise."""
        return self.totals.compute(step, "the loads of experts", reduce, is_right, ranks)

    def have_gradients_changed(self, step: int) -> bool:
        """Return whether reduced gradients of an audited step have changed in memory, or differ between their copies.

        Call before they are read. The passes must then run again. Collective over all ranks. Raises AuditMismatchError
        on all of them if that happens for the second time.
        """
        changed = self.context.tracer.find_wrong_sum() or self.memory.find_changed_gradient()
        if self._have_changed(step, changed, "reduced gradients"):
            return True
        return self._do_copies_differ(step)

    def _raise_if_changed(self, step: int, changed: str | None) -> None:
        by_rank = gather_texts(changed, self.context)
        self.passes.raise_if_aborted()
        if by_rank:
            self._raise_if_on_all_ranks(by_rank)
            raise StateChangedError(step, by_rank, f"step {step}")

    def _raise_if_on_all_ranks(self, changed: Mapping[int, str]) -> None:
        """Raise CallbackError if memory has changed on all ranks, of several."""
        if len(changed) == self.context.layout.world_size > 1:
            raise CallbackError(
                f"callbacks: in an audited step, {changed[0]} has changed on all ranks; change state in post_step and "
                "gradients in pre_optim_step, with a priority below 99, or set fault.audit_interval to 0"
            )

    def _do_copies_differ(self, step: int) -> bool:
        """Return whether ranks that hold the same gradients got different ones, as from a wrong all-gather."""
        holders = ShardHolders(self.context.layout)
        if max(map(holders.count_copies, holders.kinds)) == 1:
            return False
        began, is_repeated = time.time(), self._gradients is not None and self._gradients[0] == step
        computations = ShardComputations(self.context, holders, "gradients")
        if self._gradients is not None and is_repeated:
            computations = self._gradients[1]
        differs = computations.add(self.update.trace_reduced_gradients(self.memory.recorded_gradients))
        self.passes.raise_if_aborted()
        self._gradients = (step, computations) if differs and not is_repeated else None
        if is_repeated:
            for finding in self.passes.judge(step, computations):
                self.report(step, finding, began)
        return self._gradients is not None

    def have_clipped_gradients_changed(self, step: int) -> bool:
        """Return whether clipped gradients differ from what `compute_norm` verified. As `have_gradients_changed`."""
        changed = _find_difference([self._clipped], self.update.trace_gradients())
        return self._have_changed(step, changed, "clipped gradients")

    def compute_norm(self, step: int, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return what `compute` returns: the norm of gradients, and the factor that clips them, verified.

        Collective over all ranks. Raises as `verify_update` does.
        """
        norm, scale = self._compute_norm(step, compute)

        def trace(draw: int, attempt: int) -> Mapping[ParameterKind, ShardTraces]:
            nonlocal norm, scale
            if attempt:
                norm, scale = self._compute_norm(step, compute)
            return self.update.compute_clipping(draw, scale)

        self._clipped = self._audit(step, "the norm of gradients", trace)
        return norm, scale

    def _compute_norm(self, step: int, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        ranks = self.context.get_state_ranks()
        return self.totals.compute(step, "the norm of gradients", compute, self.update.is_norm_right, ranks)

    def verify_update(self, step: int, lr: float) -> None:
        """Verify what the optimizer will do with the current gradients. Collective over all ranks.

        Raises on all ranks AuditMismatchError if a fault is persistent, and StateChangedError if the state of one has
        changed since the passes began; and GenerationAbortedError if collectives were aborted meanwhile.
        """
        # As late as possible: under ZeRO, another rank gets what has changed, and agrees.
        self._raise_if_changed(step, self.memory.find_changed_state(after_passes=True))
        self._updated = [] if self.matrices is None else self._verify_matrices(step, self.matrices, lr)
        update = self.update
        self._updated.append(self._audit(step, "the update", lambda draw, _: update.compute_update(draw, lr)))

    def compare_updated_state(self) -> None:
        """Compare the state of this rank after an update with what was verified, for `check_updated_state`."""
        if self._updated:
            trace = Trace()
            for audits in (self.matrices, self.update):
                if audits is not None:
                    audits.trace_state(trace)
            self._wrongly_updated = _find_difference(self._updated, trace)
            self._updated = []

    def check_updated_state(self, step: int) -> None:
        """Raise StateChangedError on all ranks if the update was wrong on one. Collective over all ranks."""
        changed, self._wrongly_updated = self._wrongly_updated, None
        by_rank = gather_texts(changed, self.context)
        self.passes.raise_if_aborted()
        if by_rank:
            raise StateChangedError(step, by_rank, "its update was computed")

    def _verify_matrices(
        self, step: int, matrices: MatrixAudits, lr: float
    ) -> list[Mapping[ParameterKind, ShardTraces]]:
        """Verify the update of the matrices of Muon, in the order in which it is computed. Return what is verified."""
        momenta = self._audit(step, "momenta", lambda draw, _: matrices.compute_momenta(draw))
        began, findings = time.time(), matrices.orthogonalize(MAX_ATTEMPTS)
        self.passes.raise_if_aborted()
        if persistent := [finding for finding in findings if finding.is_persistent]:
            raise AuditMismatchError(step, persistent)
        for finding in findings:
            self.report(step, finding, began)
        return [momenta, self._audit(step, "the update", lambda draw, _: matrices.compute_weights(draw, lr))]

    def _audit(
        self, step: int, subject: str, compute: Callable[[int, int], Mapping[ParameterKind, ShardTraces]]
    ) -> Mapping[ParameterKind, ShardTraces]:
        """Compute the traces of shards on several ranks, again if they differ, and return them when they agree."""
        began, number = time.time(), self.schedule.plan(step).number
        computations = ShardComputations(self.context, ShardHolders(self.context.layout), subject)
        for attempt in range(MAX_ATTEMPTS):
            traces = compute(number + attempt % 2, attempt)
            computations.add(traces)
            self.passes.raise_if_aborted()
            if not computations.has_differed:
                break
        for finding in self.passes.judge(step, computations):
            self.report(step, finding, began)
        return traces

    def _have_changed(self, step: int, changed: str | None, subject: str) -> bool:
        began, by_rank = time.time(), gather_texts(changed, self.context)
        self.passes.raise_if_aborted()
        is_persistent = step == self._step_with_changed_gradients
        findings = [Finding(rank, subject, name, "memory", is_persistent) for rank, name in by_rank.items()]
        if findings and is_persistent:
            self._raise_if_on_all_ranks(by_rank)
            raise AuditMismatchError(step, findings)
        for finding in findings:
            self.report(step, finding, began)
            self._step_with_changed_gradients = step
        return bool(findings)


def _find_difference(verified: Sequence[Mapping[ParameterKind, ShardTraces]], live: Trace) -> str | None:
    """Return the name of the first tensor of a trace that differs from a verified one; None if there is none."""
    entries, own = live.to_entries(), [traces.own for by_kind in verified for traces in by_kind.values()]
    labels = {label for _, label, _ in entries}
    expected = [entry for trace in own for entry in trace.to_entries() if entry[1] in labels]
    difference = find_first_difference(sorted(expected, key=_get_label), entries)
    return None if difference is None else difference[1]


def _get_label(entry: Entry) -> str:
    return entry[1]


def _is_aborted(control: ControlChannel) -> bool:
    return control.is_aborted


def _report(emit: Callable[[Record], None], step: int, finding: Finding, began: float) -> None:
    """Emit the incident of a transient fault. `began`: when it was found."""
    emit(
        {
            "type": "incident",
            "kind": "silent corruption",
            "rank": finding.rank,
            "operation": f"audit of step {step + 1}",
            "reason": str(finding),
            "time": began,
            "recovered_s": time.time() - began,
            "steps_lost": 0,
        }
    )
