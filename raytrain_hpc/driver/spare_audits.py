"""Executor of audits by spares while a generation runs: one at a time, in processes that would otherwise wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from raytrain_hpc.driver.corruption_attribution import REPLICAS_DIFFER
from raytrain_hpc.driver.ray_messages import extract_last_line
from raytrain_hpc.driver.rendezvous_store import RendezvousStore
from raytrain_hpc.driver.worker_group import Worker
from raytrain_hpc.elastic.audit_verdict import DISPUTED, FAULTY_DEVICE, SUSPECTED, Finding
from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit, choose_spare_interval, get_unit_layout
from raytrain_hpc.elastic.spare_audit_verdict import Disagreement, UnitTraces, find_differences, settle
from raytrain_hpc.runtime.audit_sample import AuditSample
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec

_log = logging.getLogger(__name__)

_MAX_FAULTY = 2  # spares in a row that are at fault, after which they are not likely to be what is wrong

Samples = Sequence[tuple[AuditSample, Any]]  # of all ranks of an audit, with references to their weights


@dataclass
class _RunningAudit:
    """An audit in progress. `calls`: of the spares; `computed`: what earlier calls have returned."""

    samples: Samples
    spares: Sequence[Worker]
    calls: list[Any]
    began: float
    computed: list[UnitTraces] = field(default_factory=list)

    @property
    def audit(self) -> SpareAudit:
        """What is computed again."""
        return self.samples[0][0].audit

    @property
    def of_ranks(self) -> UnitTraces:
        """The traces of the audited ranks."""
        by_rank = {sample.rank: sample.traces for sample, _ in self.samples}
        return [by_rank[rank] for rank in self.audit.ranks]


class DisputedEnd(NamedTuple):
    """The failure of a generation that a disagreement has ended. `trusted_step`: the one before the disputed one."""

    rank: int
    kind: str
    reason: str
    trusted_step: int


class SpareAudits:
    """The audits of a run by its idle spares.

    `disagreement`: the last one, until it is settled. Its ranks are to go back to a state from before it.
    """

    def __init__(self, store: RendezvousStore):
        """`store`: where spares meet, under the numbers below 0 instead of generations."""
        self._store = store
        self._on_record: Callable[[Record], None] = _ignore_record
        self._spec_ref: Any = None
        self._generation, self._interval, self._num_spares, self._num_calls = 0, 0, 0, 0
        self._last_step = -1  # of the last sample that was received
        self._requests: list[Any] = []  # for the samples of all ranks: references to the sample, and to its weights
        self._running: _RunningAudit | None = None
        self.disagreement: Disagreement | None = None
        self._is_new = False  # whether the disagreement is of this generation
        self._is_requested = False  # whether `take_request` has returned True for it
        self._has_other_ranks = False  # than those of one unit, which can audit them
        self._is_undecided = False  # whether the disagreement has been repeated, and no other rank can decide it
        self._num_faulty = 0  # spares that were at fault
        self._num_equal = 0  # microbatches of this generation with the same bits
        self._accused: set[int] = set()  # ids of the spares that were wrong in a disagreement

    def begin_generation(self, spec: WorkerSpec, spec_ref: Any, on_record: Callable[[Record], None]) -> None:
        """Audit this generation from now on. `on_record`: takes incidents and notes."""
        self._spec_ref, self._generation, self._on_record = spec_ref, spec.generation, on_record
        microbatches = spec.batching.split_by_rank(spec.layout.dp_size)
        is_on = self._num_faulty < _MAX_FAULTY
        self._interval = choose_spare_interval(spec.config, microbatches) if is_on else 0
        unit = get_unit_layout(spec.config, spec.layout)
        self._num_spares, self._has_other_ranks = unit.world_size, spec.layout.dp_size > unit.dp_size
        self._last_step, self._is_new = spec.start_step - 1, False

    def end_generation(self) -> None:
        """Cut the audit in progress short, since its spares may become ranks, and report how many have been made."""
        if self._running is not None:
            for spare in self._running.spares:
                spare.actor.cancel_warmup.remote(self._generation)
            if len(self._running.spares) > 1:
                self._store.abort_generation(-self._num_calls)  # some may have left before they met
        self._running, self._requests = None, []
        if self._num_equal:
            text = f"audits  spares have computed {self._num_equal} microbatches again, with the bits of the ranks"
            self._on_record({"type": "note", "text": text})
        self._num_equal = 0

    def update(self, members: Sequence[Worker], idle: Sequence[Worker], committed_step: int) -> list[Worker]:
        """Make progress, and return spares that compute wrong, to be replaced. Does not block.

        Call while a generation runs. `idle`: warm workers that are no members. `committed_step`: of the ranks.
        """
        if self._is_new:  # the generation is about to end
            return []
        if self._running is not None:
            return self._finish_calls(self._running)
        if self._requests:
            self._receive_samples(idle)
        elif len(idle) >= self._num_spares and self._is_sampled(committed_step):
            self._requests = [member.actor.take_sample.remote(self._last_step) for member in members]
        return []

    def _is_sampled(self, committed_step: int) -> bool:
        """Return whether ranks have a later sample than the last one: that of step k + 1 follows k committed ones."""
        interval = self._interval
        return interval > 0 and committed_step // interval > (self._last_step + 1) // interval

    def take_request(self) -> bool:
        """Return once whether ranks are to end the generation without its state, after a new disagreement."""
        is_due, self._is_requested = self._is_new and not self._is_requested, self._is_new
        return is_due

    def explain_end(self, kinds: Collection[str]) -> DisputedEnd | None:
        """Return the failure of a generation if it has ended because of a disagreement.

        `kinds`: of the failures of its ranks. If ranks have found that one of them computes wrong, that settles it.
        """
        if FAULTY_DEVICE in kinds:
            self.disagreement = None
        if self.disagreement is None or not self._is_new or set(kinds) != {REPLICAS_DIFFER}:
            return None
        audit = self.disagreement.audit
        found = find_differences(audit, self.disagreement.of_spares, self.disagreement.of_ranks, "ranks")
        reason = f"a spare has computed {found[0].subject} differently, twice alike ({found[0].tensor} first)"
        return DisputedEnd(found[0].rank, SUSPECTED if self._is_undecided else DISPUTED, reason, audit.step)

    def _receive_samples(self, idle: Sequence[Worker]) -> None:
        """Start an audit when all ranks have answered, if their samples are of one step."""
        if ray.wait(refs := [sample for sample, _ in self._requests], num_returns=len(refs), timeout=0)[1]:
            return
        requests, self._requests = self._requests, []
        try:
            taken = [(sample, weights) for sample, (_, weights) in zip(ray.get(refs), requests, strict=True) if sample]
        except RayError:  # a rank is lost, which others notice
            return
        if not taken:
            return
        self._last_step = max(sample.audit.step for sample, _ in taken)
        samples = [(sample, weights) for sample, weights in taken if sample.audit.step == self._last_step]
        audit = samples[0][0].audit
        if {sample.rank for sample, _ in samples} != {*audit.ranks, *audit.sources} or len(idle) < self._num_spares:
            return  # some ranks have a sample of a later step by now
        if self.disagreement is not None and audit.step > self.disagreement.audit.step:
            self.disagreement = None  # its step was not audited again
        self._running = _RunningAudit(samples, idle[: self._num_spares], [], time.time())
        self._settle(self._running)
        self._start_calls(self._running)

    def _start_calls(self, running: _RunningAudit) -> None:
        self._num_calls += 1
        batches = {sample.rank: sample.batch for sample, _ in running.samples}
        sources = [(sample.index, weights) for sample, weights in running.samples if sample.index is not None]
        indexes, weights = [index for index, _ in sources], [block for _, block in sources]
        rendezvous = self._store.create_rendezvous(-self._num_calls) if len(running.spares) > 1 else None
        running.calls = [
            spare.actor.audit.remote(
                *(self._spec_ref, running.audit, position, rendezvous),
                *(batches[running.audit.ranks[position]], indexes, weights),
            )
            for position, spare in enumerate(running.spares)
        ]

    def _finish_calls(self, running: _RunningAudit) -> list[Worker]:
        """Judge what the spares have returned, and let them compute again if it differs for the first time."""
        if ray.wait(running.calls, num_returns=len(running.calls), timeout=0)[1]:
            return []
        results = []
        for spare, call in zip(running.spares, running.calls, strict=True):
            try:
                results.append(ray.get(call))
            except RayError as error:
                if isinstance(error, RayActorError):
                    spare.warmup.program = None  # the next warm-up finds that it is dead
                _log.warning("an audit by a spare failed: %s", extract_last_line(error))
        if None in results or len(results) < len(running.calls):
            self._running = None
            return []
        running.computed.append(results)
        is_first, right = len(running.computed) == 1, running.of_ranks
        differs = bool(find_differences(running.audit, right, results, "spares"))
        if differs and is_first:
            self._start_calls(running)
            return []
        self._running = None
        self._num_equal += not differs
        if not differs:
            self._num_faulty = 0
        return [] if is_first else self._judge(running, differs=differs)

    def _judge(self, running: _RunningAudit, *, differs: bool) -> list[Worker]:
        """Return the spares that are at fault, after they have computed twice. `differs`: also the second time."""
        audit, (first, second) = running.audit, running.computed
        findings = find_differences(audit, running.of_ranks, first, "spares")
        is_unstable = bool(find_differences(audit, first, second, "spares"))
        guilty = [running.spares[finding.rank] for finding in findings]
        if differs and (is_unstable or any(spare.worker_id in self._accused for spare in guilty)):
            self._report(running, findings, FAULTY_DEVICE, "wrong again when repeated")
            self._note_faulty()
            return guilty
        if differs:
            self.disagreement, self._is_new = Disagreement(audit, running.of_ranks, first), True
            for spare in running.spares:
                spare.suspected_in = spare.suspected_in or self._generation
        else:
            self._report(running, findings, "silent corruption", "right when repeated")
        return []

    def _note_faulty(self) -> None:
        self._num_faulty += 1
        if self._num_faulty == _MAX_FAULTY:
            self._interval = 0
            _log.warning(
                "%d spares in a row have computed something else than ranks, so spares audit no more: callbacks may "
                "change what passes compute, and spares do not run them",
                _MAX_FAULTY,
            )

    def _settle(self, running: _RunningAudit) -> None:
        """Tell who was wrong in the disagreement, if ranks have computed its microbatch again."""
        disagreement = self.disagreement
        if disagreement is None or (wrong := settle(disagreement, running.audit, running.of_ranks)) is None:
            return
        if wrong == "ranks":
            findings = find_differences(running.audit, running.of_ranks, disagreement.of_ranks, "ranks")
            for finding in findings:
                self._on_record(_make_incident(running, finding.rank, "silent corruption", str(finding)))
            self.disagreement, self._is_undecided = None, False
        elif self._has_other_ranks:
            findings = find_differences(running.audit, running.of_ranks, disagreement.of_spares, "spares")
            self._accused |= {running.spares[finding.rank].worker_id for finding in findings}
            self._report(running, findings, "silent corruption", "as ranks tell that computed it again")
            self.disagreement = None
        else:
            self._is_undecided = True

    def _report(self, running: _RunningAudit, findings: Sequence[Finding], kind: str, more: str) -> None:
        """Emit an incident for each spare that was wrong."""
        for finding in findings:
            info = running.spares[finding.rank].info
            reason = f"a spare computed {finding.subject} wrong ({finding.tensor} first), {more}"
            place = {key: info[key] for key in ("node", "node_id", "pid")}
            self._on_record(_make_incident(running, None, kind, reason) | place)


def _make_incident(running: _RunningAudit, rank: int | None, kind: str, reason: str) -> Record:
    return {
        "type": "incident",
        "kind": kind,
        "rank": rank,
        "operation": f"audit of step {running.audit.step + 1} by a spare",
        "reason": reason,
        "time": running.began,
        "recovered_s": time.time() - running.began,
        "steps_lost": 0,
    }


def _ignore_record(record: Record) -> None:
    """Discard a record before the first generation."""
