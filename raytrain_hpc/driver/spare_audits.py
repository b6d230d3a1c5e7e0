"""Executor of audits by spares while a generation runs: one at a time, in processes that would otherwise wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from raytrain_hpc.driver.ray_messages import extract_last_line
from raytrain_hpc.driver.rendezvous_store import RendezvousStore
from raytrain_hpc.driver.running_spare_audit import RunningAudit, get_place, is_complete, make_incident
from raytrain_hpc.driver.worker_group import Worker
from raytrain_hpc.elastic.audit_verdict import DISPUTED, FAULTY_DEVICE, SUSPECTED, Finding
from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit, choose_spare_interval, get_unit_layout
from raytrain_hpc.elastic.spare_audit_verdict import Disagreement, find_differences, settle
from raytrain_hpc.runtime.audit_sample import AuditSample, Traces
from raytrain_hpc.runtime.control_channel import Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec

_log = logging.getLogger(__name__)

_MAX_FAULTY = 2  # spares in a row that are at fault, after which they are not likely to be what is wrong
_MAX_UNEQUAL = 3  # audits from the start of a run that all differ, after which it is not a fault that differs
_MAX_FAILED = 3  # audits in a row that fail, as for lack of memory
_REQUEST_INTERVAL_S = 0.1  # between two requests for samples
_MIN_DELAY_STEPS = 2  # committed steps after a request from which on all ranks know of it, if steps are long
_HUNG_S, _HUNG_FACTOR = 600.0, 10  # an audit that takes longer never ends: this long, and times the longest so far


@dataclass(frozen=True)
class _Dispute:
    """A disagreement, and who was in it. `spares`, `members`: by position among spares, and by rank."""

    disagreement: Disagreement
    spares: Sequence[Worker]
    members: Sequence[Worker]


class EndedSpares(NamedTuple):
    """Spares to be replaced: those that compute wrong, and those that do not answer, or wait for one that does not."""

    wrong: Sequence[Worker] = ()
    silent: Sequence[Worker] = ()


class DisputedEnd(NamedTuple):
    """The failure of a generation that a disagreement has ended. `trusted_step`: the one before the disputed one."""

    rank: int
    kind: str
    reason: str
    trusted_step: int


class SpareAudits:
    """The audits of a run by its idle spares."""

    def __init__(self, store: RendezvousStore):
        """`store`: where spares meet, under the numbers below 0 instead of generations."""
        self._store = store
        self._on_record: Callable[[Record], None] = _ignore_record
        self._spec_ref: Any = None
        self._generation, self._interval, self._num_spares, self._num_calls = 0, 0, 0, 0
        self._next_step = 0  # the first one that ranks may sample
        self._requested_at = 0  # committed steps at the last request for samples
        self._next_request = 0.0  # monotonic seconds at which samples may be asked for again
        self._requests: list[Any] = []  # for the samples of all ranks: references to the sample, and to its weights
        self._running: RunningAudit | None = None
        self._dispute: _Dispute | None = None  # until it is settled
        self._held: _Dispute | None = None  # the first one, until it is known that spares compute like ranks at all
        self._is_new = False  # whether the dispute is of this generation
        self._is_requested = False  # whether `take_request` has returned True for it
        self._undecided: SpareAudit | None = None  # of a dispute that was repeated, and that no other rank can decide
        self._has_other_ranks = False  # than those of one unit, which can audit them
        self._num_unequal, self._num_faulty, self._num_failed = 0, 0, 0  # in a row; see _MAX_UNEQUAL and others
        self._has_agreed, self._off_reason, self._longest_s = False, "", 0.0
        self._num_equal = 0  # microbatches of this generation with the same bits
        self._accused: set[int] = set()  # ids of the spares that were wrong in a dispute
        self._unsettled: set[int] = set()  # ids of the spares of disputes that ended without a verdict

    @property
    def disputed_step(self) -> int | None:
        """The last step before the one of a dispute that is not settled: the next generation computes it again."""
        return None if self._dispute is None else self._dispute.disagreement.audit.step

    def begin_generation(self, spec: WorkerSpec, spec_ref: Any, on_record: Callable[[Record], None]) -> None:
        """Audit this generation from now on. `on_record`: takes incidents and notes."""
        self._spec_ref, self._generation, self._on_record = spec_ref, spec.generation, on_record
        self._interval = 0 if self._off_reason else choose_spare_interval(spec.config)
        unit = get_unit_layout(spec.config, spec.layout)
        self._num_spares, self._has_other_ranks = unit.world_size, spec.layout.dp_size > unit.dp_size
        self._next_step, self._is_new = max(spec.start_step, self.disputed_step or 0), False
        self._held = None  # its ranks can be others now

    def end_generation(self) -> None:
        """Cut the audit in progress short, since its spares may become ranks, and report how many have been made."""
        if self._running is not None:
            for spare in self._running.spares:
                spare.actor.cancel_warmup.remote(self._generation)
            if len(self._running.spares) > 1:
                self._store.abort_generation(-self._num_calls)  # some may have left before they met
            if self._running.accused:
                self._open_dispute(self._running)
            elif self._running.computed:
                step = self._running.audit.step + 1
                self._note(f"a spare has computed a microbatch of step {step} differently than a rank, once so far")
        self._running, self._requests = None, []
        if self._num_equal:
            self._note(f"spares have computed {self._num_equal} microbatches again, with the bits of the ranks")
        self._num_equal = 0

    def update(self, members: Sequence[Worker], idle: Sequence[Worker], committed_step: int) -> EndedSpares:
        """Make progress, and return the spares that are to be replaced. Does not block.

        Call while a generation runs. `idle`: warm workers that are no members. `committed_step`: by all ranks.
        """
        if self._is_new:
            return EndedSpares()
        if self._running is not None:
            return self._finish_calls(self._running, idle)
        if not self._interval:
            return EndedSpares()
        if self._requests:
            self._receive_samples(members, idle, committed_step)
        elif len(idle) >= self._num_spares and self._is_sampled(committed_step):
            self._next_request = time.monotonic() + _REQUEST_INTERVAL_S
            self._requested_at = committed_step
            self._requests = [member.actor.take_sample.remote() for member in members]
        return EndedSpares()

    def _is_sampled(self, committed_step: int) -> bool:
        """Return whether ranks can have a sample: the first one that is due from `_next_step` on."""
        return committed_step >= self._first_sampled and time.monotonic() >= self._next_request

    @property
    def _first_sampled(self) -> int:
        """The first step from `_next_step` on that is due; ranks sample the next one if they audit this one."""
        return -(-(self._next_step + 1) // self._interval) * self._interval

    def _clear_samples(self, members: Sequence[Worker], committed_step: int) -> None:
        """Let ranks sample again, from a step on before which all of them know it."""
        delay_steps = _MIN_DELAY_STEPS + 2 * (committed_step - self._requested_at)
        self._next_step = committed_step + delay_steps
        for member in members:
            member.actor.clear_sample.remote(self._next_step)

    @property
    def is_disputed(self) -> bool:
        """Whether a spare disagrees with a rank of this generation, which is to go back."""
        return self._is_new

    def take_request(self) -> bool:
        """Return once whether ranks are to end the generation without its state, after a new dispute."""
        is_due, self._is_requested = self._is_new and not self._is_requested, self._is_new
        return is_due

    def explain_end(self, kinds: Collection[str]) -> DisputedEnd | None:
        """Return the failure because of which a generation with a new dispute goes back, however it has ended.

        `kinds`: of the failures of its ranks. If ranks have found that one of them computes wrong, that settles it: no
        step is computed again to tell who was wrong.
        """
        dispute = self._dispute
        if FAULTY_DEVICE in kinds:
            self._close_dispute()
        if dispute is None or not self._is_new:
            return None
        disagreement, audit = dispute.disagreement, dispute.disagreement.audit
        found = find_differences(audit, disagreement.of_spares, disagreement.of_ranks, "ranks")
        reason = f"a spare has computed {found[0].subject} differently, twice alike ({found[0].tensor} first)"
        kind = SUSPECTED if audit == self._undecided else DISPUTED
        if kind == SUSPECTED:
            for spare in dispute.spares:
                spare.suspected_in = spare.suspected_in or self._generation
            self._close_dispute()
        return DisputedEnd(found[0].rank, kind, reason, audit.step)

    def _receive_samples(self, members: Sequence[Worker], idle: Sequence[Worker], committed_step: int) -> None:
        """Start an audit when all ranks have answered, if their samples are of one step."""
        if ray.wait(refs := [sample for sample, _ in self._requests], num_returns=len(refs), timeout=0)[1]:
            return
        requests, self._requests = self._requests, []
        try:
            answers = ray.get(refs)
        except RayError:  # a rank is lost, which others notice
            return
        by_step: dict[int, list[tuple[AuditSample, Any]]] = {}
        for sample, (_, weights) in zip(answers, requests, strict=True):
            if sample is not None and sample.generation == self._generation:
                by_step.setdefault(sample.audit.step, []).append((sample, weights))
        # Ranks that are not in an audit wait with a sample of a later one; some may have missed its step.
        complete = [step for step, samples in by_step.items() if is_complete(samples)]
        # Without any sample of this generation, the number of committed steps can still be that of an earlier one.
        if complete or (by_step and self._requested_at > self._first_sampled + 1):
            self._clear_samples(members, committed_step)
        if not complete or len(idle) < self._num_spares:
            return
        samples = by_step[max(complete)]
        self._running = RunningAudit(samples, members, idle[: self._num_spares], [], time.time())
        self._settle(self._running)
        self._start_calls(self._running)

    def _start_calls(self, running: RunningAudit) -> None:
        self._num_calls += 1
        running.called_at = time.monotonic()
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

    def _finish_calls(self, running: RunningAudit, idle: Sequence[Worker]) -> EndedSpares:
        """Judge what the spares have returned, and let them compute again if it differs for the first time."""
        ended, pending = ray.wait(running.calls, num_returns=len(running.calls), timeout=0)
        results = {
            spare: self._read_result(running, spare, call) for spare, call in running.get_calls() if call in ended
        }
        has_failed = None in results.values()
        if pending and not (running.is_stuck() if has_failed else self._is_hung(running)):
            return EndedSpares()
        if pending or has_failed:
            self._running = None
            if running.accused:  # the others cannot tell who is wrong
                self._open_dispute(running)
            return EndedSpares(silent=[spare for spare in running.spares if spare not in results])
        traces = [result for result in results.values() if result is not None]
        running.computed.append(traces)
        self._num_failed, self._longest_s = 0, max(self._longest_s, running.measure_s())
        is_first = len(running.computed) == 1
        differs = bool(find_differences(running.audit, running.of_ranks, traces, "spares"))
        if differs and is_first:
            self._start_calls(running)
            return EndedSpares()
        self._running = None
        if not differs:
            self._num_equal, self._num_faulty, self._has_agreed = self._num_equal + 1, 0, True
            self._open_held()
        if running.accused:
            return EndedSpares(self._judge_by_others(running, differs=differs))
        return EndedSpares([] if is_first else self._judge(running, idle, differs=differs))

    def _is_hung(self, running: RunningAudit) -> bool:
        """Return whether no audit takes as long as this one."""
        seconds = running.measure_s()
        if is_hung := seconds > max(_HUNG_S, _HUNG_FACTOR * self._longest_s):
            self._note(f"no answer of a spare within {seconds:.0f} s, so that it is replaced")
            self._count_failed()
        return is_hung

    def _read_result(self, running: RunningAudit, spare: Worker, call: Any) -> Traces | None:
        """Return the traces of a spare; None if it was cancelled or has failed."""
        try:
            result: Traces | None = ray.get(call)
        except RayError as error:
            if call not in running.failed:
                _log.warning("an audit by a spare failed: %s", extract_last_line(error))
                if not running.failed:  # others of the audit fail with it
                    self._count_failed()
                running.failed.append(call)
            if isinstance(error, RayActorError):
                spare.warmup.program = None  # its next warm-up finds that it is dead
            return None
        return result

    def _count_failed(self) -> None:
        self._num_failed += 1
        if self._num_failed >= _MAX_FAILED:
            self._stop("several audits in a row have failed, as they do if the model does not fit")

    def _judge(self, running: RunningAudit, idle: Sequence[Worker], *, differs: bool) -> list[Worker]:
        """Return the spares that are at fault, after they have computed twice. `differs`: also the second time.

        If either they or the ranks can be, other spares compute the same, if there are enough.
        """
        audit, (first, second) = running.audit, running.computed
        findings = find_differences(audit, running.of_ranks, first, "spares")
        is_unstable = bool(find_differences(audit, first, second, "spares"))
        guilty = [running.spares[finding.rank] for finding in findings]
        if differs and (is_unstable or any(spare.worker_id in self._accused for spare in guilty)):
            self._report(running.spares, running, findings, FAULTY_DEVICE, "wrong again when repeated")
            self._num_faulty += 1
            if self._num_faulty == _MAX_FAULTY:
                self._stop("two spares in a row have computed something else than ranks")
            return guilty
        if not differs:
            self._report(running.spares, running, findings, "silent corruption", "right when repeated")
            return []
        others = [spare for spare in idle if spare not in running.spares]
        running.accused, spares = running.spares, others[: self._num_spares]
        if len(spares) < self._num_spares:
            self._open_dispute(running)
        else:
            self._running, running.spares, running.failed, running.failed_at = running, spares, [], None
            self._start_calls(running)
        return []

    def _judge_by_others(self, running: RunningAudit, *, differs: bool) -> list[Worker]:
        """Return the spares that are at fault, after others have computed the same. `differs`: from the ranks too."""
        if differs:
            self._open_dispute(running)
            return []
        findings = find_differences(running.audit, running.of_ranks, running.computed[0], "spares")
        self._report(running.accused, running, findings, FAULTY_DEVICE, "again when repeated, another one did not")
        return [running.accused[finding.rank] for finding in findings]

    def _open_dispute(self, running: RunningAudit) -> None:
        """Go back, since a rank or the accused spares are wrong, unless no spare has computed like ranks so far."""
        disagreement = Disagreement(running.audit, running.of_ranks, running.computed[0])
        dispute = _Dispute(disagreement, running.accused, running.members)
        if self._has_agreed:
            self._dispute, self._is_new = dispute, True
            return
        self._held, self._num_unequal = self._held or dispute, self._num_unequal + 1
        if self._num_unequal == _MAX_UNEQUAL:
            self._stop("spares have never computed the bits of ranks")

    def _open_held(self) -> None:
        """Go back after a dispute from before spares had agreed with ranks for the first time."""
        if self._held is not None:
            self._dispute, self._held, self._is_new = self._held, None, True

    def _stop(self, reason: str) -> None:
        """Let spares audit no more."""
        if not self._off_reason:
            self._off_reason, self._interval = reason, 0
            _log.warning(
                "%s, so they audit no more; callbacks, which spares do not run, may change what passes compute, or the "
                "devices of spares may differ",
                reason,
            )

    def _settle(self, running: RunningAudit) -> None:
        """Tell who was wrong in the dispute, if ranks have computed its microbatch again."""
        dispute = self._dispute
        if dispute is None:
            return
        old, audit = dispute.disagreement, running.audit
        wrong = settle(old, audit, running.of_ranks)
        if wrong == "spares" and not self._has_other_ranks:
            self._undecided = audit
            return
        if wrong == "ranks":
            for finding in find_differences(audit, running.of_ranks, old.of_ranks, "ranks"):
                place = get_place(dispute.members[finding.rank])
                self._on_record(make_incident(running, finding.rank, "silent corruption", str(finding)) | place)
        elif wrong == "spares":
            findings = find_differences(audit, running.of_ranks, old.of_spares, "spares")
            self._accused |= {dispute.spares[finding.rank].worker_id for finding in findings}
            self._report(dispute.spares, running, findings, "silent corruption", "as ranks tell that computed it again")
        elif self._has_other_ranks:  # its step was not sampled again, or in another layout; ranks have found nothing
            spares = {spare.worker_id for spare in dispute.spares}
            self._accused |= spares & self._unsettled
            self._unsettled |= spares
        self._close_dispute()

    def _close_dispute(self) -> None:
        self._dispute, self._undecided = None, None

    def _report(
        self, spares: Sequence[Worker], running: RunningAudit, findings: Sequence[Finding], kind: str, more: str
    ) -> None:
        """Emit an incident for each spare that was wrong."""
        for finding in findings:
            reason = f"a spare computed {finding.subject} wrong ({finding.tensor} first), {more}"
            place = get_place(spares[finding.rank])
            self._on_record(make_incident(running, None, kind, reason) | place)

    def _note(self, text: str) -> None:
        self._on_record({"type": "note", "text": f"audits  {text}"})


def _ignore_record(record: Record) -> None:
    """Discard a record before the first generation."""
