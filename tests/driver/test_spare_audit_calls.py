"""Calls and verdicts of audits by spares, on a fake Ray: what each answer of ranks and spares leads to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raytrain_hpc.driver import spare_audits
from raytrain_hpc.driver.corruption_attribution import REPLICAS_DIFFER
from raytrain_hpc.driver.spare_audits import SpareAudits
from raytrain_hpc.driver.spare_warmup import WarmupState
from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit
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
    """A run on ranks whose samples are set, and one spare."""

    def __init__(self, num_ranks: int = 2):
        self.layout, self.records = Layout(dp_replicate=num_ranks), list[dict[str, Any]]()
        self.audits, self.spare = SpareAudits(SimpleNamespace()), Spare()  # type: ignore[arg-type]
        self.samples: list[AuditSample | None] = [None] * num_ranks
        spec = make_worker_spec(make_small_config(None, *WORDS), 1, steps_to=50)
        self._spec = replace(spec, layout=self.layout)
        self.begin(1)

    def begin(self, generation: int) -> None:
        self.audits.begin_generation(replace(self._spec, generation=generation), "spec", self.records.append)

    def set_samples(self, traces: Any, *, step: int = 4, rank: int = 1) -> None:
        source = (rank + 1) % len(self.samples)
        audit = SpareAudit(step, Layout(), (rank,), (3,), (source,))
        self.samples = [None] * len(self.samples)
        self.samples[source] = AuditSample(audit, source, index={})
        own = AuditSample(audit, rank, (tuple(map(tuple, traces)))) if source != rank else None
        self.samples[rank] = own or AuditSample(audit, rank, tuple(map(tuple, traces)), index={})

    def audit(self, *answers: Any, step: int = 5) -> list[Any]:
        """Let the audit of the samples run to its end, with these answers of the spare; return the faulty ones."""
        self.spare.answers += answers
        faulty = []
        for _ in range(5):
            faulty += self.audits.update(list(map(self._make_member, self.samples)), [self.spare], step)
        return faulty

    def _make_member(self, sample: AuditSample | None) -> Any:
        def take(after_step: int) -> tuple[FakeRef, FakeRef]:
            is_new = sample is not None and sample.audit.step > after_step
            return FakeRef().resolve(sample if is_new else None), FakeRef().resolve(None)

        return SimpleNamespace(actor=SimpleNamespace(take_sample=SimpleNamespace(remote=take)))

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


def test_equal_traces_are_counted_and_reported_at_the_end() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(RIGHT) == [] and run.audits.disagreement is None and run.records == []
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


def test_samples_of_different_steps_are_not_compared() -> None:
    run = Run()
    run.set_samples(RIGHT, step=9)
    later = run.samples
    run.set_samples(RIGHT)
    run.samples[0] = later[0]
    run.audit(WRONG, step=12)
    assert run.spare.answers == [WRONG] and run.audits.disagreement is None


def test_an_error_of_a_spare_that_is_gone_when_repeated_is_an_incident() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(WRONG, RIGHT) == [] and run.audits.disagreement is None
    ((kind, rank, reason),) = run.get_incidents()
    assert (kind, rank) == ("silent corruption", None) and "gradient of w first), right when repeated" in reason


def test_a_spare_that_computes_something_else_each_time_is_at_fault() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(WRONG, OTHER) == [run.spare] and run.audits.disagreement is None
    assert [incident[:2] for incident in run.get_incidents()] == [("faulty device", None)]


def test_spares_audit_no_more_if_two_in_a_row_are_at_fault(caplog: pytest.LogCaptureFixture) -> None:
    """As with callbacks that change what passes compute."""
    run = Run()
    for spare, step in ((Spare(7), 4), (Spare(8), 9)):
        run.spare = spare
        run.set_samples(RIGHT, step=step)
        assert run.audit(WRONG, OTHER, step=step + 1) == [spare]
    assert "spares do not run them" in caplog.text
    run.begin(2)
    run.set_samples(RIGHT, step=14)
    assert run.audit(WRONG, step=20) == [] and run.spare.answers == [WRONG]


def disagree(run: Run) -> None:
    run.set_samples(RIGHT)
    assert run.audit(WRONG, WRONG) == [] and run.audits.take_request() and not run.audits.take_request()
    end = run.audits.explain_end([REPLICAS_DIFFER])
    assert end is not None and (end.rank, end.kind, end.trusted_step) == (1, "disputed", 4)
    assert "microbatch 3 of step 5 differently, twice alike (gradient of w first)" in end.reason
    run.audits.end_generation()
    run.begin(2)
    assert not run.audits.take_request() and run.audits.explain_end([REPLICAS_DIFFER]) is None


def test_a_rank_that_computes_like_the_spare_afterwards_was_wrong() -> None:
    run = Run()
    disagree(run)
    run.set_samples(WRONG)
    assert run.audit(WRONG) == [] and run.audits.disagreement is None
    assert [incident[:2] for incident in run.get_incidents()] == [("silent corruption", 1)]


def test_a_spare_that_is_wrong_again_is_at_fault() -> None:
    run = Run()
    disagree(run)
    run.set_samples(RIGHT)
    assert run.audit(WRONG, WRONG) == [run.spare] and run.audits.disagreement is None
    assert [incident[:2] for incident in run.get_incidents()] == [("silent corruption", None), ("faulty device", None)]


def test_a_disagreement_ends_when_ranks_find_the_faulty_one() -> None:
    run = Run()
    disagree(run)
    assert run.audits.explain_end(["faulty device", REPLICAS_DIFFER]) is None and run.audits.disagreement is None


def test_a_disagreement_is_dropped_if_its_step_is_not_audited_again() -> None:
    run = Run()
    disagree(run)
    run.set_samples(RIGHT, step=9)
    run.audit(RIGHT, step=10)
    assert run.audits.disagreement is None and run.get_incidents() == []


def test_without_another_rank_the_one_that_a_spare_disagrees_with_again_is_replaced() -> None:
    """Either can be at fault: the spare becomes the rank."""
    run = Run(num_ranks=1)
    run.set_samples(RIGHT, rank=0)
    run.audit(WRONG, WRONG)
    assert run.audits.explain_end([REPLICAS_DIFFER]).kind == "disputed"  # type: ignore[union-attr]
    run.begin(2)
    assert run.audit(WRONG, WRONG) == []
    assert run.audits.explain_end([REPLICAS_DIFFER]).kind == "suspected"  # type: ignore[union-attr]
    assert run.get_incidents() == []


def test_a_dead_spare_is_left_to_its_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(ActorDiedError()) == [] and run.spare.warmup.is_cold
    assert run.audits.disagreement is None and "an audit by a spare failed" in caplog.text


def test_a_cancelled_audit_says_nothing() -> None:
    run = Run()
    run.set_samples(RIGHT)
    assert run.audit(None) == [] and run.audits.disagreement is None and run.records == []
    run.set_samples(RIGHT, step=9)
    run.audit(step=10)  # in progress
    run.audits.end_generation()
    assert run.spare.cancelled == [1]
