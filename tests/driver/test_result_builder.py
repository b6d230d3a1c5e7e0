"""Startup times of a result: phases end with their last rank; and its productive time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from raytrain_hpc.driver.result_builder import compute_startup_times
from raytrain_hpc.driver.run_recorder import RunTotals

TIMESTAMPS = {"began": 100.0, "cluster": 101.0}
RANK_INFOS = [{"began": 103.0, "imported": 104.0}, {"began": 102.0, "imported": 106.0}]


def make_recorder(first_step_unix: float | None, *ready_unix: float | None) -> Any:
    records = {rank: {"unix": unix} for rank, unix in enumerate(ready_unix) if unix is not None}
    return SimpleNamespace(ready_records=records, totals=SimpleNamespace(first_step_unix=first_step_unix))


def test_phases_end_with_their_last_rank() -> None:
    times = compute_startup_times(make_recorder(110.0, 107.0, 108.0), TIMESTAMPS, RANK_INFOS)
    assert times == {
        "cluster_s": 1.0,
        "actors_s": 2.0,
        "imports_s": 3.0,
        "model_s": 2.0,
        "first_step_s": 2.0,
        "total_s": 10.0,
    }


def test_no_step_gives_no_times() -> None:
    assert compute_startup_times(make_recorder(None, 107.0), TIMESTAMPS, RANK_INFOS) == {}


def test_a_rank_that_was_lost_before_it_had_a_model_is_left_out() -> None:
    assert compute_startup_times(make_recorder(110.0, 107.0, None), TIMESTAMPS, RANK_INFOS)["model_s"] == 1.0
    assert compute_startup_times(make_recorder(110.0, None), TIMESTAMPS, RANK_INFOS) == {}


def test_steps_that_are_lost_are_not_productive_and_few_of_the_unsaved_ones_are_kept() -> None:
    """Without checkpoints, a run goes back to a recent step in memory, or to its beginning."""
    totals = RunTotals()
    for step in range(1, 50_001):
        totals.add_step(step, 0.5)
    assert len(totals.unsaved_steps) <= 10_000 and totals.productive_step_s == 25_000.0
    totals.undo_steps_after(49_990)
    assert totals.productive_step_s == 24_995.0
    totals.undo_steps_after(0)
    assert totals.productive_step_s == 0.0 and totals.unsaved_steps == []
