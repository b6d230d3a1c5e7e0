"""Pipeline executor: times against the simulator, microbatches in flight, elements sent, and refused settings."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.planner.pipeline_schedule import SCHEDULE_NAMES
from raytrain_hpc.planner.pipeline_timeline import simulate
from tests.parallel.pipeline_bubble import SECONDS, WIDTH, make_schedule, run_schedule
from tests.pipeline_loads import count_max_in_flight
from tests.warm_pool import WarmPool, make_small_config

MICROBATCHES = 8


@pytest.fixture(scope="module")
def recorded(pool: WarmPool) -> dict[str, list]:
    return {name: pool.call(run_schedule, 4, name, MICROBATCHES, False) for name in SCHEDULE_NAMES}


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_actions_run_at_the_simulated_times(recorded: dict[str, list], name: str) -> None:
    """Virtual clocks travel with the messages. `python -m tests.parallel.pipeline_bubble` measures real time."""
    schedule = make_schedule(name)
    simulated = simulate(schedule.build_orders(MICROBATCHES), lambda action: SECONDS[action.kind], schedule.num_stages)
    ends = {span.action: span.end for span in simulated}
    for rank, (spans, _, _, finished) in enumerate(recorded[name]):
        assert tuple(span.action for span in spans) == schedule.build_orders(MICROBATCHES)[rank]
        assert finished == pytest.approx({action: ends[action] for action in schedule.build_orders(MICROBATCHES)[rank]})
        assert all(span.begin <= span.end <= next_span.begin for span, next_span in itertools.pairwise(spans))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_microbatches_in_flight_and_elements_sent(recorded: dict[str, list], name: str) -> None:
    """FORMULAS.md: a boundary between two ranks sends b s h forward and b s h backward per microbatch."""
    schedule = make_schedule(name)
    orders = schedule.build_orders(MICROBATCHES)
    boundaries = [
        (stage, stage + 1)
        for stage in range(schedule.num_stages - 1)
        if schedule.get_rank_of_stage(stage) != schedule.get_rank_of_stage(stage + 1)
    ]
    for rank, (_, in_flight, elements, _) in enumerate(recorded[name]):
        assert in_flight == count_max_in_flight(orders[rank])
        ends = sum(
            (schedule.get_rank_of_stage(a) == rank) + (schedule.get_rank_of_stage(b) == rank) for a, b in boundaries
        )
        assert elements == ends * MICROBATCHES * WIDTH


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (["parallel.pp=4", "model.num_layers=3"], "pp=4", "there are 3 layers, and this layout needs at least 4"),
        (["parallel.pp=2", "parallel.pp_schedule=zbv"], "pp=2", "there are 3 layers, and this layout needs at least 4"),
        (["parallel.pp=3"], "pp=3", "must divide the 4 workers"),
        (
            ["parallel.pp=2", "parallel.pp_stages_per_rank=2"],
            "pp_stages_per_rank=2",
            "1f1b has one stage per rank; leave it auto",
        ),
        (
            ["parallel.pp=2", "parallel.pp_schedule=zbv", "parallel.pp_stages_per_rank=3"],
            "pp_stages_per_rank=3",
            "two stages per rank",
        ),
        (["parallel.tp=2", "parallel.pp=4"], "pp=4", "must divide the 2 workers that tp=2 leaves"),
    ],
)
def test_pipelines_that_leave_a_rank_empty_are_refused(
    tmp_path: Path, words: list[str], key: str, message: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        prepare_run(make_small_config(tmp_path, "cluster.workers=4", "model.num_layers=3", *words), None, print)
    assert message in str(refused.value) and f"parallel.{key}" in str(refused.value)


def test_a_microbatch_count_that_the_schedule_does_not_support_is_refused(tmp_path: Path) -> None:
    words = ["cluster.workers=2", "parallel.pp=2", "model.num_layers=4", "parallel.pp_schedule=interleaved_1f1b"]
    with pytest.raises(LayoutError) as refused:
        prepare_run(
            make_small_config(tmp_path, *words, "train.global_batch_size=5", "train.micro_batch_size=1"), None, print
        )
    assert "train.micro_batch_size=1" in str(refused.value)
    assert "2 equal rounds; 5 microbatches are not a multiple of 2" in str(refused.value)
    prepared = prepare_run(
        make_small_config(tmp_path, *words, "train.global_batch_size=5"), None, print
    )  # auto finds a value that fits
    assert prepared.resolve_layout(2)[1].count == 1
