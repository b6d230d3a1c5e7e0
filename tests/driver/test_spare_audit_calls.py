"""Calls and verdicts of audits by spares, on a fake Ray: what each answer of ranks and spares leads to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError

from raytrain_hpc.driver import running_spare_audit, spare_audits
from raytrain_hpc.driver.corruption_attribution import REPLICAS_DIFFER
from raytrain_hpc.driver.failure_explanation import attribute_disagreement
from raytrain_hpc.driver.spare_audits import EndedSpares, SpareAudits
from raytrain_hpc.driver.spare_warmup import WarmupState
from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit
from raytrain_hpc.errors import WorkerFailedError
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.runtime.audit_sample import AuditSample
from tests.driver.fake_ray import FakeRef
from tests.warm_pool import make_small_config, make_worker_spec

WORDS = ["train.deterministic=elastic", "fault.audit_interval=100", "fault.spare_audit_interval=5", "cluster.spares=1"]
RIGHT, WRONG, OTHER = ([[("contributed", "gradient of w", value), ("contributed", "loss", 7)]] for value in (1, 2, 3))


@dataclass(eq=False)
class Spare:
    """A spare that returns the next of its answers at once."""

    worker_id: int = 9
    answers: list[Any] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    suspected_in: int = 0

    def __post_init__(self) -> None:
        self.warmup, self.info = WarmupState(program="compiled"), {"node": "n", "node_id": "id", "pid": 4}
        self.actor = SimpleNamespace(
            audit=SimpleNamespace(remote=self._audit), cancel_warmup=SimpleNamespace(remote=self.cancelled.append)
        )

    def _audit(self, *arguments: Any) -> FakeRef:
        if not self.answers:
            return FakeRef()  # it is still computing
        answer = self.answers.pop(0)
        return FakeRef().resolve(error=answer) if isinstance(answer, Exception) else FakeRef().resolve(answer)


class Run:
    """A run on ranks whose samples are set, and one spare, or two."""

    def __init__(self, num_ranks: int = 2):
        self.layout, self.records = Layout(dp_replicate=num_ranks), list[dict[str, Any]]()
        self.rank = min(1, num_ranks - 1)  # that is audited
        self.audits, self.spare = SpareAudits(SimpleNamespace()), Spare()  # type: ignore[arg-type]
        self.samples: list[AuditSample | None] = [None] * num_ranks
        self.other: Spare | None = None
        self.num_wrong = 0  # spares, of those that are to be replaced
        self.next_steps: list[int] = []  # from which on ranks were told to take the next samples
        spec = make_worker_spec(make_small_config(None, *WORDS), 1, steps_to=50)
        self._spec = replace(spec, layout=self.layout)
        self.begin(1)

    def begin(self, generation: int) -> None:
        self.generation = generation
        self.audits.begin_generation(replace(self._spec, generation=generation), "spec", self.records.append)

    def set_samples(self, traces: Any, *, step: int = 4, rank: int = 1) -> None:
        rank = min(rank, self.rank)
        source = (rank + 1) % len(self.samples)
        audit = SpareAudit(step, Layout(), (rank,), (3,), (source,))
        self.samples = [None] * len(self.samples)
        self.samples[source] = AuditSample(audit, self.generation, source, index={})
        own = AuditSample(audit, self.generation, rank, (tuple(map(tuple, traces)))) if source != rank else None
        self.samples[rank] = own or AuditSample(audit, self.generation, rank, tuple(map(tuple, traces)), index={})

    def audit(self, *answers: Any, step: int = 5) -> list[Any]:
        """Let the audit of the samples run to its end, with these answers of the spare; return those to be replaced."""
        self.spare.answers += answers
        ended = []
        for _ in range(5):
            members = [self.make_member(rank) for rank in range(len(self.samples))]
            idle: list[Any] = [self.spare] if self.other is None else [self.spare, self.other]
            update = self.audits.update(members, idle, step)
            self.num_wrong += len(update.wrong)
            ended += [*update.wrong, *update.silent]
        return ended

    def make_member(self, rank: int) -> Any:
        def take() -> tuple[FakeRef, FakeRef]:
            return FakeRef().resolve(self.samples[rank]), FakeRef().resolve(None)

        def clear(next_step: int) -> None:
            self.samples[rank] = None
            self.next_steps.append(next_step)

        info = {"node": "n", "node_id": "id", "pid": 100 + rank}
        actor = SimpleNamespace(take_sample=SimpleNamespace(remote=take), clear_sample=SimpleNamespace(remote=clear))
        return SimpleNamespace(actor=actor, info=info)

    def get_incidents(self) -> list[tuple[str, int | None, str]]:
        incidents = [record for record in self.records if record["type"] == "incident"]
        return [(record["kind"], record["rank"], record["reason"]) for record in incidents]


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(references: Any) -> Any:
        if isinstance(references, list):
            return [get(reference) for reference in references]
        if references.error is not None:
            raise references.error
        return references.value

    def wait(references: list[FakeRef], *, num_returns: int, timeout: float) -> tuple[list[FakeRef], list[FakeRef]]:
        return [ref for ref in references if ref.ready], [ref for ref in references if not ref.ready]

    monkeypatch.setattr(spare_audits, "ray", SimpleNamespace(get=get, wait=wait))
    monkeypatch.setattr(spare_audits, "_REQUEST_INTERVAL_S", 0.0)


class Clock:
    """The time, which stands still."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (spare_audits, running_spare_audit):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_equal_traces_are_counted_and_reported_at_the_end() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(RIGHT) == [] and run.audits.disputed_step is None and run.records == []
    run.audits.end_generation()
    assert "1 microbatches again" in run.records[0]["text"] and len(run.records) == 1


def test_nothing_is_asked_before_there_is_a_new_sample() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(step=4) == [] and run.spare.answers == []
    run.audit(RIGHT)
    run.spare.answers = [WRONG]
    run.audit(step=9)
    assert run.spare.answers == [WRONG], "the sample of step 5 was audited, that of step 10 is not there yet"


def test_a_sample_of_an_earlier_generation_is_ignored() -> None:
    run = Run()
    run.set_samples(RIGHT)
    run.begin(2)
    run.audit(WRONG)
    assert run.spare.answers == [WRONG]


def test_samples_of_different_steps_are_not_compared() -> None:
    run = Run()
    run.set_samples(RIGHT, step=9)
    later = run.samples
    run.set_samples(RIGHT)
    run.samples[0] = later[0]
    run.audit(WRONG, step=12)
    assert run.spare.answers == [WRONG] and run.audits.disputed_step is None


def test_a_rank_that_waits_with_a_later_sample_does_not_keep_others_from_being_audited() -> None:
    run = Run(num_ranks=3)
    run.set_samples(RIGHT, step=9, rank=0)
    (later,) = [sample for sample in run.samples if sample is not None and sample.rank == 0]
    run.set_samples(RIGHT)
    run.samples[0] = later
    run.audit(RIGHT, step=12)
    assert run.spare.answers == []


def test_ranks_sample_again_from_a_step_on_before_which_all_know_it() -> None:
    """The delay grows with the steps that are committed before all ranks have answered."""
    run = Run()
    run.set_samples(RIGHT)
    members = [run.make_member(rank) for rank in range(2)]
    run.audits.update(members, [run.spare], 5)
    assert run.next_steps == [], "samples are kept until all have answered"
    run.audits.update(members, [run.spare], 8)  # the answers, after three steps
    assert run.next_steps == [8 + 2 + 2 * 3] * 2


def test_a_step_that_a_rank_has_not_sampled_is_given_up_when_all_have_passed_it() -> None:
    run = Run()
    run.set_samples(RIGHT)
    run.samples[0] = None  # the source of the weights
    run.audit(WRONG, step=5)
    run.audit(step=6)
    assert run.next_steps == [] and run.spare.answers == [WRONG], "it may still be in the step, or in the next one"
    run.audit(step=7)
    assert run.next_steps == [7 + 2] * 2 and run.spare.answers == [WRONG]


def test_a_dispute_is_about_the_step_that_is_sampled_next() -> None:
    run = Run()
    dispute(run)
    run.set_samples(RIGHT, step=9)
    run.audit(RIGHT, step=9)
    assert run.spare.answers == [RIGHT] and run.audits.disputed_step == 9
    run.audit(step=10)
    assert run.audits.disputed_step is None


def test_an_error_of_a_spare_that_is_gone_when_repeated_is_an_incident() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(WRONG, RIGHT) == [] and run.audits.disputed_step is None
    ((kind, rank, reason),) = run.get_incidents()
    assert (kind, rank) == ("silent corruption", None) and "gradient of w first), right when repeated" in reason


def test_a_spare_that_computes_something_else_each_time_is_at_fault() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(WRONG, OTHER) == [run.spare] and run.audits.disputed_step is None
    assert [incident[:2] for incident in run.get_incidents()] == [("faulty device", None)]


def test_spares_audit_no_more_if_two_in_a_row_are_at_fault(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    for spare, step in ((Spare(7), 4), (Spare(8), 9)):
        run.spare = spare
        run.set_samples(RIGHT, step=step)
        assert run.audit(WRONG, OTHER, step=step + 1) == [spare]
    assert "two spares in a row have computed something else than ranks, so they audit no more" in caplog.text
    run.begin(2)
    run.set_samples(RIGHT, step=14)
    assert run.audit(WRONG, step=20) == [] and run.spare.answers == [WRONG]


def dispute(run: Run) -> None:
    """Let a spare agree with a rank, and disagree about the next sample."""
    run.set_samples(RIGHT, step=4)
    run.audit(RIGHT)
    run.set_samples(RIGHT, step=9)
    assert run.audit(WRONG, WRONG, step=10) == [] and run.audits.take_request() and not run.audits.take_request()
    end = run.audits.explain_end([REPLICAS_DIFFER])
    assert end is not None and (end.rank, end.kind, end.trusted_step) == (run.rank, "disputed", 9)
    assert "microbatch 3 of step 10 differently, twice alike (gradient of w first)" in end.reason
    run.audits.end_generation()
    run.begin(2)
    assert not run.audits.take_request() and run.audits.explain_end([REPLICAS_DIFFER]) is None
    run.records.clear()


def disagree(run: Run, *of_other: Any) -> list[Any]:
    """Let a spare agree, and then disagree, after which another one computes the same. Return those to be replaced."""
    run.other = Spare(10, list(of_other))
    run.set_samples(RIGHT)
    run.audit(RIGHT)
    run.set_samples(RIGHT, step=9)
    return run.audit(WRONG, WRONG, step=10)


def test_a_spare_is_at_fault_if_another_one_computes_like_the_ranks() -> None:
    """They train on."""
    run = Run()
    assert disagree(run, RIGHT) == [run.spare] and not run.audits.is_disputed and run.audits.explain_end([]) is None
    ((kind, rank, reason),) = run.get_incidents()
    assert (kind, rank) == ("faulty device", None) and "again when repeated, another one did not" in reason
    assert run.other is not None and run.other.answers == []


@pytest.mark.parametrize("answer", [WRONG, OTHER, RayError()], ids=["like the first", "something else", "nothing"])
def test_the_run_goes_back_if_no_spare_computes_like_the_ranks(answer: Any) -> None:
    run = Run()
    assert disagree(run, answer) == [] and run.audits.take_request()
    end = run.audits.explain_end([REPLICAS_DIFFER])
    assert end is not None and (end.rank, end.kind, end.trusted_step) == (run.rank, "disputed", 9)


def test_the_run_goes_back_if_it_ends_before_another_spare_has_computed_the_same() -> None:
    run = Run()
    assert disagree(run) == [] and not run.audits.is_disputed
    run.audits.end_generation()
    assert run.audits.is_disputed and run.audits.explain_end(["died"]) is not None
    assert run.other is not None and run.other.cancelled == [1] and run.spare.cancelled == []


def test_the_run_goes_back_however_the_disputed_generation_ends() -> None:
    for kinds in (["died", REPLICAS_DIFFER], ["raised"], []):
        run = Run()
        run.set_samples(RIGHT)
        run.audit(RIGHT)
        run.set_samples(RIGHT, step=9)
        run.audit(WRONG, WRONG, step=10)
        end = run.audits.explain_end(kinds)
        assert run.audits.is_disputed and end is not None and end.trusted_step == 9


def test_ranks_that_find_the_faulty_one_in_the_disputed_generation_go_back_before_the_disputed_step() -> None:
    """They had audited later steps, but not the disputed one."""
    run = Run()
    run.set_samples(RIGHT)
    run.audit(RIGHT)
    run.set_samples(RIGHT, step=9)
    run.audit(WRONG, WRONG, step=10)
    faulty = make_failure("faulty device")
    attribute_disagreement(failures := {0: faulty, 1: make_failure(REPLICAS_DIFFER)}, run.audits, [], fail)
    assert failures[0] is faulty and [failure.trusted_step for failure in failures.values()] == [9, 9]
    assert run.audits.disputed_step is None


def fail(*_: Any) -> Any:
    raise RuntimeError("ranks have named the one at fault")


def make_failure(kind: str) -> WorkerFailedError:
    return WorkerFailedError(0, "n", 1, kind, "")


def test_a_difference_before_any_agreement_is_disputed_once_there_is_one() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(WRONG, WRONG) == [] and run.audits.disputed_step is None
    run.set_samples(RIGHT, step=9)
    run.audit(RIGHT, step=10)
    end = run.audits.explain_end([])
    assert end is not None and (end.kind, end.trusted_step) == ("disputed", 4)


def test_spares_that_never_agree_audit_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """As with callbacks that change what passes compute. No rank and no spare is replaced."""
    run = Run()
    for step in (4, 9, 14):
        run.set_samples(RIGHT, step=step)
        assert run.audit(WRONG, WRONG, step=step + 1) == [] and run.audits.disputed_step is None
    assert "spares have never computed the bits of ranks, so they audit no more" in caplog.text
    run.begin(2)
    run.set_samples(RIGHT, step=19)
    assert run.audit(WRONG, step=20) == [] and run.spare.answers == [WRONG] and run.get_incidents() == []


def test_a_rank_that_computes_like_the_spare_afterwards_was_wrong() -> None:
    run = Run()
    dispute(run)
    run.set_samples(WRONG, step=9)
    assert run.audit(WRONG, step=10) == [] and run.audits.disputed_step is None
    assert [incident[:2] for incident in run.get_incidents()] == [("silent corruption", 1)]
    assert run.records[0]["pid"] == 101, "of the process that was wrong"
    assert run.spare.suspected_in == 0


def test_a_spare_that_is_wrong_again_is_at_fault() -> None:
    run = Run()
    dispute(run)
    run.set_samples(RIGHT, step=9)
    assert run.audit(WRONG, WRONG, step=10) == [run.spare] and run.audits.disputed_step is None
    assert [incident[:2] for incident in run.get_incidents()] == [("silent corruption", None), ("faulty device", None)]


def test_the_spare_that_was_wrong_is_named_although_another_one_audits_now() -> None:
    run = Run()
    dispute(run)
    first, run.spare = run.spare, Spare(8)
    run.spare.info["pid"] = 5
    run.set_samples(RIGHT, step=9)
    assert run.audit(RIGHT, step=10) == []
    assert [record["pid"] for record in run.records if record["type"] == "incident"] == [first.info["pid"]]


def test_a_dispute_ends_when_ranks_find_the_faulty_one() -> None:
    run = Run()
    dispute(run)
    assert run.audits.explain_end(["faulty device", REPLICAS_DIFFER]) is None and run.audits.disputed_step is None


def test_a_spare_is_accused_if_ranks_find_nothing_in_two_disputes_that_are_not_sampled_again() -> None:
    """In a single one, the rank can have been wrong once."""
    run = Run()
    dispute(run)
    run.set_samples(RIGHT, step=14)
    run.audit(RIGHT, step=15)
    assert run.audits.disputed_step is None and run.get_incidents() == []
    run.set_samples(RIGHT, step=19)
    assert run.audit(WRONG, WRONG, step=20) == [] and run.audits.disputed_step == 19
    run.audits.end_generation()
    run.begin(3)
    run.set_samples(RIGHT, step=24)
    run.audit(RIGHT, step=25)
    run.set_samples(RIGHT, step=29)
    assert run.audit(WRONG, WRONG, step=30) == [run.spare]


def make_group(*answers: Any) -> tuple[Run, list[Any]]:
    """Return a run of which three spares audit three tensor-parallel ranks together, and the spares."""
    run, layout = Run(num_ranks=3), Layout(tp=3)
    run.audits = SpareAudits(SimpleNamespace(create_rendezvous=str, abort_generation=str))  # type: ignore[arg-type]
    run._spec = replace(run._spec, layout=layout)
    run.begin(1)
    audit, traces = SpareAudit(4, layout, (0, 1, 2), (3,), (0, 1, 2)), tuple(map(tuple, RIGHT))
    run.samples = [AuditSample(audit, 1, rank, traces, index={}) for rank in range(3)]
    return run, [Spare(10 + number, [answer]) for number, answer in enumerate(answers)]


def test_an_audit_that_fails_on_several_spares_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    """One that dies makes the others fail."""
    run, spares = make_group(RayError(), RayError(), RayError())
    for _ in range(5):
        run.audits.update([run.make_member(rank) for rank in range(3)], spares, 5)
    assert caplog.text.count("an audit by a spare failed") == 3 and "audit no more" not in caplog.text


def test_calls_that_are_pending_when_spares_stop_to_audit_are_still_watched(clock: Clock) -> None:
    run, spares = make_group(RayError(), RIGHT, RIGHT)
    run.audits._num_failed = 2
    spares[2].answers = []  # it waits for the one that has failed
    members, silent = [run.make_member(rank) for rank in range(3)], list[Any]()
    for _ in range(10):
        silent += run.audits.update(members, spares, 5).silent
        clock.now += 10
    assert silent == [spares[2]]


def test_a_difference_before_any_agreement_is_forgotten_with_its_generation() -> None:
    """The ranks of the next one have other numbers."""
    run = Run(num_ranks=4)
    run.rank = 3
    run.set_samples(RIGHT, rank=3)
    assert run.audit(WRONG, WRONG) == []
    run.begin(2)
    run.set_samples(RIGHT, step=9)
    run.audit(RIGHT, step=10)
    assert not run.audits.is_disputed and run.audits.explain_end([]) is None


def test_without_another_rank_the_one_that_a_spare_disagrees_with_again_is_replaced() -> None:
    """Either can be at fault: the spare becomes the rank. What follows is another dispute."""
    run = Run(num_ranks=1)
    dispute(run)
    run.set_samples(RIGHT, step=9)
    assert run.audit(WRONG, WRONG, step=10) == []
    end = run.audits.explain_end([REPLICAS_DIFFER])
    assert end is not None and end.kind == "suspected" and run.spare.suspected_in == 2
    assert run.audits.disputed_step is None and run.get_incidents() == []
    run.begin(3)
    run.set_samples(RIGHT, step=14)
    run.audit(WRONG, WRONG, step=15)
    end = run.audits.explain_end([REPLICAS_DIFFER])
    assert end is not None and end.kind == "disputed"


def test_audits_that_fail_again_and_again_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    for step in (4, 9, 14):
        run.set_samples(RIGHT, step=step)
        assert run.audit(RayError("out of memory"), step=step + 1) == []
    assert "several audits in a row have failed" in caplog.text
    run.set_samples(RIGHT, step=19)
    run.audit(RIGHT, step=20)
    assert run.spare.answers == [RIGHT]


def test_a_spare_that_never_answers_is_replaced(clock: Clock) -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit() == [], "it computes"
    clock.now += 599
    assert run.audit() == [] and run.records == []
    clock.now += 2
    assert run.audit() == [run.spare]
    assert [record["text"] for record in run.records] == [
        "audits  no answer of a spare within 601 s, so that it is replaced"
    ]
    assert run.num_wrong == 0, "its node may be used"
    clock.now += 1000
    run.set_samples(RIGHT, step=4)
    assert run.audit(RIGHT, step=30) == [] and run.audits.disputed_step is None, "another one audits"


def test_audits_that_never_end_are_given_up(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    run, step = Run(), 4
    for _ in range(3):
        run.set_samples(RIGHT, step=step)
        assert run.audit(step=step + 1) == []
        clock.now += 601
        assert run.audit(step=step + 1) == [run.spare] and run.num_wrong == 0
        step += 100
    assert "several audits in a row have failed" in caplog.text
    run.set_samples(RIGHT, step=step)
    run.audit(RIGHT, step=step + 1)
    assert run.spare.answers == [RIGHT], "nothing is asked of it"


def test_an_audit_may_take_ten_times_the_longest_one(clock: Clock) -> None:
    run = Run()
    run.set_samples(RIGHT)
    members = [run.make_member(rank) for rank in range(2)]
    for _ in range(2):
        run.audits.update(members, [run.spare], 5)
    running = run.audits._running
    assert running is not None
    clock.now += 100
    running.calls[0].resolve(RIGHT)
    assert run.audits.update(members, [run.spare], 5) == EndedSpares([])
    run.set_samples(RIGHT, step=99)
    assert run.audit(step=200) == []
    clock.now += 999
    assert run.audit() == []
    clock.now += 2
    assert run.audit() == [run.spare]


def test_a_difference_that_was_not_computed_again_is_noted() -> None:
    run = Run()
    run.set_samples(RIGHT)
    run.audit(WRONG)  # the second computation is in progress
    run.audits.end_generation()
    assert "microbatch of step 5 differently than a rank, once so far" in run.records[0]["text"]


def test_a_dead_spare_is_left_to_its_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(ActorDiedError()) == [] and run.spare.warmup.is_cold
    assert run.audits.disputed_step is None and "an audit by a spare failed" in caplog.text


def test_a_cancelled_audit_says_nothing() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(None) == [] and run.audits.disputed_step is None and run.records == []
    run.set_samples(RIGHT, step=9)
    run.audit(step=10)  # in progress
    run.audits.end_generation()
    assert run.spare.cancelled == [1]
