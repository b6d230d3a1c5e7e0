"""The deadline policy, against a simulation of steps, of the request to stop and of the checkpoint."""

from __future__ import annotations

import itertools

import pytest

from raytrain_hpc.elastic.deadline import Deadline, StopCosts, assume_save_s, should_stop

POLL_S = 1.0
DEADLINE = Deadline(10_000.0, "test")


def simulate(step_s: float, measured_save_s: float, save_s: float, phase: float) -> tuple[float, float]:
    """Run until the policy stops; return when the checkpoint is complete, and the idle time left before the deadline.

    The request comes too late for the step that runs: the ranks have already agreed to go through another one.
    """
    now = next(
        second
        for second in itertools.count(phase, POLL_S)
        if should_stop(second, DEADLINE, StopCosts(step_s, measured_save_s))
    )
    step_end = (now // step_s + 1) * step_s
    saved = step_end + step_s + save_s
    return saved, DEADLINE.unix - saved


@pytest.mark.parametrize("step_s", [0.01, 0.9, 7.3, 120.0, 900.0])
@pytest.mark.parametrize("save_s", [0.1, 20.0, 600.0])
@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_checkpoint_is_complete_before_the_deadline_and_not_long_before(
    step_s: float, save_s: float, slower: float
) -> None:
    for phase in (0.0, 0.37, 0.99):
        saved, left = simulate(step_s, save_s, slower * save_s, phase)
        assert saved < DEADLINE.unix - 10, "the processes have time to end"
        assert left < 20 + 2 * step_s + save_s, "no more than a slower checkpoint and two steps are left unused"


def test_unmeasured_checkpoint_is_assumed_to_be_slow() -> None:
    assert assume_save_s(50_000_000_000) == pytest.approx(1000)
    assert assume_save_s(None) > assume_save_s(0)


def test_margin_is_explained() -> None:
    costs = StopCosts(2.5, 4.0)
    assert costs.margin_s == 28
    assert costs.describe() == "28 s = 2 steps of 2.5 s + 2 x 4 s for a checkpoint + 15 s to exit"
    assert should_stop(9972.0, DEADLINE, costs) and not should_stop(9971.9, DEADLINE, costs)
