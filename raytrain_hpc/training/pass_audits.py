"""Audits of passes: another rank computes a microbatch again, and another rank sums each gradient again.

Needs `train.deterministic=elastic`, with which a microbatch has the same bits on all ranks. An audited step begins with
passes over a microbatch of another data-parallel rank, whose gradients are dropped. Hashes of what these passes
communicate and contribute are compared with those of the owner's passes (parallel/computation_trace.py). In the
reduction of gradients, each rank also computes the sums of another one (parallel/pairwise_all_reduce.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.distributed.process_groups import GenerationAbortedError, ParallelContext
from raytrain_hpc.distributed.replica_check import CorruptionError
from raytrain_hpc.elastic.audit_schedule import Audit, AuditSchedule
from raytrain_hpc.elastic.audit_verdict import (
    FAULTY_DEVICE,
    Computation,
    Entry,
    Finding,
    find_faults,
    find_first_difference,
    judge,
    merge_findings,
)
from raytrain_hpc.elastic.model_replicas import ModelReplicas, Place
from raytrain_hpc.elastic.shard_holders import ParameterKind, ShardHolders, choose_shift
from raytrain_hpc.parallel.computation_trace import ShardTraces, Trace
from raytrain_hpc.training.data_builder import Loader
from raytrain_hpc.training.rank_exchange import exchange_objects
from raytrain_hpc.training.shard_computations import ShardComputations
from raytrain_hpc.training.traced_passes import TracedPasses
from raytrain_hpc.training.train_module import AnyBatch

ReadMicrobatch = Callable[[int, int], AnyBatch]  # (step, number of a logical microbatch) -> microbatch
ReportFinding = Callable[[int, Finding, float], None]  # (step, finding, time of its detection)

MAX_ATTEMPTS = 3  # at what is compared between two ranks: with one other rank, with a third one, and with the first


class AuditMismatchError(CorruptionError):
    """A rank computes, receives or keeps something wrong again, or two ranks disagree and no third one can decide."""

    kind = FAULTY_DEVICE

    def __init__(self, step: int, findings: Sequence[Finding]):
        certain = tuple(finding.rank for finding in findings if finding.is_certain)
        suspects = tuple(finding.rank for finding in findings if not finding.is_certain)
        super().__init__(certain, f"audit of step {step + 1}: {'; '.join(map(str, findings))}", suspects)


@dataclass
class _Passes:
    """The passes of all ranks over one microbatch each, in lockstep."""

    shift: int  # data-parallel rank r computes the microbatch of rank r + shift
    traces: list[Trace]  # of this rank
    totals: list[list[int]] = field(default_factory=list)  # by rank, then by trace: a hash of the whole trace

    def get_computation(self, replicas: ModelReplicas, owner: int) -> Computation:
        """Return the computation of the microbatch of a data-parallel rank."""
        executor = (owner - self.shift) % replicas.dp_size
        places = replicas.list_places(executor)
        return Computation(executor, tuple(places), tuple(self.totals[rank][number] for rank, number in places))


class PassAudits:
    """Auditor of the passes of the steps that are due, and of the reduction of their gradients."""

    def __init__(
        self,
        schedule: AuditSchedule,
        context: ParallelContext,
        passes: TracedPasses,
        loader: Loader,
        is_aborted: Callable[[], bool],
        report: ReportFinding,
    ):
        """`is_aborted`: whether collectives were aborted, which can return without an error, and anything.

        `report`: takes transient faults, which all ranks find alike.
        """
        self._schedule, self._context, self._passes, self._loader = schedule, context, passes, loader
        self._is_aborted, self._report = is_aborted, report
        self._replicas, self._holders = ModelReplicas(context.layout), ShardHolders(context.layout)
        self._dp_rank = context.layout.get_dp_rank(context.rank)

    def run(self, step: int, train: Callable[[bool], Tensor], read: ReadMicrobatch) -> Tensor:
        """Run the passes of an audited step by `train`, and return its result. Collective over all ranks.

        `train(again)`: runs the passes over this rank's microbatches; `again`: another time. `read`: reads a logical
        microbatch of a step. If a fault is found that is gone when repeated, all passes run again. Raises
        AuditMismatchError on all ranks if a fault is persistent or undecided, or if the second try differs too, and
        GenerationAbortedError if collectives were aborted meanwhile.
        """
        audit, findings, began = self._schedule.plan(step), list[Finding](), 0.0
        sums, context = self._make_sum_computations(), self._context
        for attempt in range(MAX_ATTEMPTS):
            audited = self._recompute(step, audit, audit.shift, read)
            traces_of_sums = self._make_traces_of_sums(audit.number + attempt % 2)
            get_slot = partial(self._schedule.get_slot, audit, context.layout)
            losses, traces = self._passes.train(get_slot, partial(train, attempt > 0), traces_of_sums)
            own = _Passes(0, traces)
            self._gather_totals([own, audited])
            sums_differ = sums.add(traces_of_sums)
            self.raise_if_aborted()
            owners = [owner for owner in range(self._replicas.dp_size) if self._differ(owner, own, audited)]
            began = began or (time.time() if owners or sums_differ else 0.0)
            if owners:
                found = self._find_faults(step, audit, [own, audited], owners, read)
                self.raise_if_aborted()
                if persistent := [finding for finding in found if finding.is_persistent or attempt]:
                    raise AuditMismatchError(step, persistent)
                findings += found
                sums = self._make_sum_computations()  # the next attempt has other contributions
            elif not sums.has_differed or attempt == MAX_ATTEMPTS - 1:
                break
            self._passes.drop_gradients()
        findings += self.judge(step, sums)
        for finding in findings:
            self._report(step, finding, began)
        return losses

    def _make_sum_computations(self) -> ShardComputations:
        return ShardComputations(self._context, self._holders, "the sum of gradients", by_copy=True)

    def find_own_difference(self, step: int, read: ReadMicrobatch) -> str | None:
        """Compute a microbatch of this rank twice, and return the name of the first tensor that differs, if one does.

        Collective over all ranks. Leaves no gradients.
        """
        audit = self._schedule.plan(step)
        first, second = [
            [entry for trace in self._recompute(step, audit, 0, read).traces for entry in trace.to_entries()]
            for _ in range(2)
        ]
        self.raise_if_aborted()
        difference = find_first_difference(first, second)
        return None if difference is None else difference[1]

    def judge(self, step: int, computations: ShardComputations) -> list[Finding]:
        """Return the faults that are gone when repeated. Collective. Raises AuditMismatchError if there are others."""
        if not computations.has_differed:
            return []
        findings = computations.find_faults()
        self.raise_if_aborted()
        if persistent := [finding for finding in findings if finding.is_persistent]:
            raise AuditMismatchError(step, persistent)
        return findings

    def _make_traces_of_sums(self, draw: int) -> dict[ParameterKind, ShardTraces]:
        """Return empty traces, for slices that other ranks sum too; which, depends on a number."""
        traces = dict[ParameterKind, ShardTraces]()
        for kind in self._holders.kinds:
            shard_shift = choose_shift(draw, self._holders.count_shards(kind))
            copy_shift = 0 if shard_shift else choose_shift(draw, self._holders.count_copies(kind))
            traces[kind] = ShardTraces(shard_shift, copy_shift)
        return traces

    def raise_if_aborted(self) -> None:
        """Raise GenerationAbortedError if collectives were aborted: what they returned means nothing."""
        if self._is_aborted():
            raise GenerationAbortedError("its collectives were aborted")

    def _recompute(self, step: int, audit: Audit, shift: int, read: ReadMicrobatch) -> _Passes:
        """Run the passes of a shift, and drop their gradients."""
        return _Passes(shift, self._passes.recompute(step, self._read(step, audit, shift, read)))

    def _read(self, step: int, audit: Audit, shift: int, read: ReadMicrobatch) -> AnyBatch:
        owner = audit.get_owner(self._dp_rank, shift)
        if self._loader.reads_any_microbatch or owner == self._dp_rank:
            return read(step, audit.microbatches[owner])
        batch, rank = read(step, audit.microbatches[self._dp_rank]), self._context.rank
        auditor, owner_rank = self._replicas.move(rank, -shift), self._replicas.move(rank, shift)
        received: AnyBatch = exchange_objects(batch, auditor, owner_rank, self._context.device)
        return received

    def _gather_totals(self, passes: Sequence[_Passes]) -> None:
        """Exchange a hash of each trace with all ranks."""
        device = self._context.device
        hashes = [torch.stack([trace.compute_total(device) for trace in of_pass.traces]) for of_pass in passes]
        own = torch.stack(hashes)
        gathered = [torch.empty_like(own) for _ in range(self._context.layout.world_size)]
        if self._context.world_group is None:
            gathered = [own]
        else:
            dist.all_gather(gathered, own, group=self._context.world_group)
        self.raise_if_aborted()
        for of_pass, by_rank in zip(passes, torch.stack(gathered, dim=1).tolist(), strict=True):
            of_pass.totals = by_rank

    def _differ(self, owner: int, *passes: _Passes) -> bool:
        """Return whether computations of the microbatch of a data-parallel rank differ."""
        return len({of_pass.get_computation(self._replicas, owner).signature for of_pass in passes}) > 1

    def _find_faults(
        self, step: int, audit: Audit, passes: Sequence[_Passes], owners: Sequence[int], read: ReadMicrobatch
    ) -> list[Finding]:
        """Compute the audited microbatches again, and return who is at fault. The step's gradients are dropped."""
        self._passes.drop_gradients()
        repeated = [
            self._recompute(step, audit, shift, read) for shift in self._schedule.list_arbitration_shifts(audit)
        ]
        self._gather_totals(repeated)
        passes, findings = [*passes, *repeated], list[Finding]()
        computations = {owner: [p.get_computation(self._replicas, owner) for p in passes] for owner in owners}
        entries = self._gather_entries(passes, computations.values())
        for owner, of_owner in computations.items():
            traces = [
                [entries[number, place] for place in computation.places] for number, computation in enumerate(of_owner)
            ]
            findings += find_faults(f"microbatch {audit.microbatches[owner]}", of_owner, judge(of_owner), traces)
        return merge_findings(findings)

    def _gather_entries(
        self, passes: Sequence[_Passes], computations: Iterable[Sequence[Computation]]
    ) -> dict[tuple[int, Place], list[Entry]]:
        """Exchange the traces of some computations. Return them by number of the passes and by place."""
        wanted = {
            (number, place)
            for of_owner in computations
            for number, computation in enumerate(of_owner)
            for place in computation.places
        }
        rank = self._context.rank
        own = {
            (number, (rank, trace)): of_pass.traces[trace].to_entries()
            for number, of_pass in enumerate(passes)
            for trace in range(len(of_pass.traces))
            if (number, (rank, trace)) in wanted
        }
        gathered = [own] * self._context.layout.world_size
        if self._context.world_group is not None:
            dist.all_gather_object(gathered, own, group=self._context.world_group)
        return {key: entries for of_rank in gathered for key, entries in of_rank.items()}
