"""The measured cost of audits, and the interval with which they cost 1 % of the time."""

from __future__ import annotations

import random

import pytest

from raytrain_hpc.elastic.audit_cost import AuditCost, adapt_interval


def simulate(interval: int, audit_s: float, *, steps: int = 1000, noise: float = 0.0, slow: float = 0.0) -> float:
    """Return the last cost, in steps of 1 s, of which a tenth of the audit's falls into the following step.

    `noise`: standard deviation of a step. `slow`: seconds that every 7th step takes longer, for another reason.
    """
    cost, last, generator = AuditCost(), 0.0, random.Random(3)
    for step in range(1, steps + 1):
        is_audited, is_after = step % interval == 0, step % interval == 1 and step > 1
        seconds = 1 + 0.9 * audit_s * is_audited + 0.1 * audit_s * is_after + generator.gauss(0, noise)
        measured = cost.add_step(seconds + slow * (step % 7 == 0), is_audited=is_audited)
        assert (measured is not None) == (is_after and step > 3 * interval)
        last = measured or last
    return last


def test_cost_is_what_audited_steps_and_those_after_them_take_longer() -> None:
    assert simulate(10, 0.5) == pytest.approx(0.5)
    assert simulate(225, 3.7) == pytest.approx(3.7)


def test_cost_is_robust() -> None:
    assert simulate(10, 0.5, noise=0.05) == pytest.approx(0.5, abs=0.2)
    assert simulate(10, 0.5, slow=20) == pytest.approx(0.5)


def test_audits_in_a_row_and_the_first_step_are_not_taken_for_others() -> None:
    cost = AuditCost()
    assert [cost.add_step(1.0, is_audited=True) for _ in range(10)] == [None] * 10, "nothing to compare with"
    assert [cost.add_step(1.0, is_audited=False) for _ in range(3)] == [None] * 3


def test_interval_makes_audits_cost_a_percent() -> None:
    assert adapt_interval(225, 3.67, 1) == 367
    assert adapt_interval(108, 0.6, 16) == 60
    assert adapt_interval(108, 0.2, 16) == 54, "at most halved at once"
    assert adapt_interval(27, 0.2, 16) == 20
    assert adapt_interval(10, -0.5, 16) == 5, "noise"
    assert adapt_interval(5, -0.5, 1) == 63, "the passes of one microbatch are those of a step"
    assert adapt_interval(4, 0.0, 1000) == 4
