"""Pipeline schedules against torch's own, and simulated times against published closed forms."""

from __future__ import annotations

import itertools
import warnings
import xml.etree.ElementTree as ElementTree

import pytest

from raytrain_hpc.planner.pipeline_schedule import SCHEDULE_NAMES, Action, PipelineSchedule
from raytrain_hpc.planner.pipeline_timeline import (
    compute_bubble_s,
    compute_idle_fraction,
    render_svg,
    simulate,
)
from raytrain_hpc.planner.stage_split import split_layers
from tests.model_specs import make_model_spec
from tests.pipeline_loads import count_max_in_flight

SCHEDULES = [
    PipelineSchedule(name, ranks, per_rank)
    for name, ranks in itertools.product(SCHEDULE_NAMES, (2, 3, 4, 5, 8))
    for per_rank in ({"gpipe": (1,), "1f1b": (1,), "zbv": (2,)}.get(name, (1, 2, 3)))
]
SIZES = [(4, 8), (4, 16), (3, 9), (8, 32)]


def list_valid_counts(schedule: PipelineSchedule) -> list[int]:
    return [m for m in range(1, 20) if schedule.find_conflict(m) is None]


def build_torch_orders(schedule: PipelineSchedule, microbatches: int) -> list[list[str]]:
    """Return the schedules of torch.distributed.pipelining, built without stages or process groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining import schedules as torch_schedules
    classes = {
        "gpipe": torch_schedules.ScheduleGPipe,
        "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
        "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
        "zbv": torch_schedules.ScheduleZBVZeroBubble,
    }
    torch_schedule = classes[schedule.name].__new__(classes[schedule.name])
    torch_schedule._n_microbatches, torch_schedule._num_stages, torch_schedule.num_stages = (
        microbatches,
        schedule.num_stages,
        schedule.num_stages,
    )
    torch_schedule.pp_group_size, torch_schedule.n_local_stages = schedule.num_ranks, schedule.stages_per_rank
    torch_schedule.number_of_rounds = max(1, microbatches // schedule.num_ranks)
    torch_schedule.microbatches_per_round = microbatches // torch_schedule.number_of_rounds
    if schedule.name == "gpipe":
        table = torch_schedule._get_pipeline_order()
    else:
        table = {rank: torch_schedule._calculate_single_rank_operations(rank) for rank in range(schedule.num_ranks)}
    return [[str(a) for a in table[rank] if a is not None and a.microbatch_index is not None] for rank in table]


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.name != "1f1b"], ids=str)
def test_orders_equal_those_of_torch(schedule: PipelineSchedule) -> None:
    for microbatches in list_valid_counts(schedule):
        orders = [[str(action) for action in order] for order in schedule.build_orders(microbatches)]
        assert orders == build_torch_orders(schedule, microbatches), microbatches


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_order_finishes_and_runs_each_action_once(schedule: PipelineSchedule) -> None:
    for microbatches in list_valid_counts(schedule):
        kinds = "FIW" if schedule.splits_backward else "FB"
        all_actions = {Action(k, s, m) for k in kinds for s in range(schedule.num_stages) for m in range(microbatches)}
        for orders, expected in (
            (schedule.build_orders(microbatches), all_actions),
            (schedule.build_forward_orders(microbatches), {a for a in all_actions if a.kind == "F"}),
        ):
            spans = simulate(orders, lambda action: 1.0, schedule.num_stages)
            assert {span.action for span in spans} == expected
            assert sum(map(len, orders)) == len(expected)
            assert all(schedule.get_rank_of_stage(span.action.stage) == span.rank for span in spans)


def test_a_deadlock_in_the_orders_raises() -> None:
    orders = [(Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0))]
    with pytest.raises(ValueError, match="wait at 0B0, 1F0"):
        simulate(orders, lambda action: 1.0, 2)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("forward_s, backward_s", [(1.0, 2.0), (3.0, 1.0)])
def test_bubbles_of_schedules_that_do_not_split_backward(p: int, m: int, forward_s: float, backward_s: float) -> None:
    """Narayanan et al. 2021, arXiv 2104.04473: (p - 1) / m of the ideal time, (p - 1) / (v m) if interleaved."""
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)):
        schedule = PipelineSchedule(name, p, v)
        times = {"F": forward_s / v, "B": backward_s / v}
        spans = simulate(schedule.build_orders(m), lambda a, times=times: times[a.kind], schedule.num_stages)
        bubble = (p - 1) / v * (forward_s + backward_s)
        assert compute_bubble_s(spans) == pytest.approx(bubble)
        assert compute_idle_fraction(spans, p) == pytest.approx(bubble / (m * (forward_s + backward_s) + bubble))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_of_schedules_that_split_backward(p: int, m: int) -> None:
    """Qi et al. 2023, arXiv 2401.10241: (p - 1)(TF + TB - TW) for ZB-H1, none for ZB-V with equal times."""
    forward_s, inputs_s, weights_s = 1.0, 1.25, 0.75
    times = {"F": forward_s, "I": inputs_s, "W": weights_s}
    h1 = PipelineSchedule("interleaved_zero_bubble", p, 1)
    spans = simulate(h1.build_orders(m), lambda action: times[action.kind], h1.num_stages)
    assert compute_bubble_s(spans) == pytest.approx((p - 1) * (forward_s + inputs_s - weights_s))
    zbv = PipelineSchedule("zbv", p, 2)
    assert compute_bubble_s(simulate(zbv.build_orders(m), lambda action: 1.0, zbv.num_stages)) == pytest.approx(0.0)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_microbatches_in_flight(p: int, m: int) -> None:
    """Activations in flight equal the published counts.

    1F1B: min(m, p - i) on rank i (Narayanan et al. 2021, arXiv 2006.09503). Interleaved: v p + p - 1 stages of 1/v of
    a rank's layers on the first rank (Korthikanti et al. 2022, arXiv 2205.05198). ZB-V: no more than 1F1B.
    """
    orders = PipelineSchedule("1f1b", p).build_orders(m)
    assert [count_max_in_flight(order)[i] for i, order in enumerate(orders)] == [min(m, p - i) for i in range(p)]
    assert [count_max_in_flight(order)[i] for i, order in enumerate(PipelineSchedule("gpipe", p).build_orders(m))] == [
        m
    ] * p
    for v in (2, 3):
        first = PipelineSchedule("interleaved_1f1b", p, v).build_orders(m)[0]
        assert count_in_flight(first) == min(v * p + p - 1, v * m)
    assert max(count_in_flight(order) for order in PipelineSchedule("zbv", p, 2).build_orders(m)) <= 2 * p


def count_in_flight(order: tuple[Action, ...]) -> int:
    max_held = held = 0
    for action in order:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        max_held = max(max_held, held)
    return max_held


def test_transfers_delay_the_next_stage() -> None:
    orders = PipelineSchedule("1f1b", 2).build_orders(1)
    spans = simulate(orders, lambda action: 1.0, 2, transfer_s=0.5)
    assert [(str(s.action), s.begin) for s in spans] == [("0F0", 0.0), ("1F0", 1.5), ("1B0", 2.5), ("0B0", 4.0)]


def test_the_svg_shows_every_action() -> None:
    schedule = PipelineSchedule("zbv", 3, 2)
    spans = simulate(schedule.build_orders(6), lambda action: 1.0, schedule.num_stages)
    picture = ElementTree.fromstring(render_svg(spans, 3))
    drawn = [node[0].text.split()[0] for node in picture if node.tag.endswith("rect")]
    assert sorted(drawn) == sorted(str(span.action) for span in spans)
    assert any(f"idle {100 * compute_idle_fraction(spans, 3):.1f} %" in (node.text or "") for node in picture)


def compute_cost(spec, seq_len: int, layers: range) -> int:
    layer = spec.count_active_matmul_parameters() + spec.hidden_size * seq_len
    ends = spec.hidden_size * (layers.start == 0) + spec.hidden_size * spec.vocab_size * (
        layers.stop == spec.num_layers
    )
    return len(layers) * layer + ends


@pytest.mark.parametrize(
    "layers, stages, vocab_size", [(7, 3, 65), (8, 4, 50257), (5, 5, 65), (9, 2, 2000), (6, 1, 65)]
)
def test_no_other_split_has_a_faster_slowest_stage(layers: int, stages: int, vocab_size: int) -> None:
    spec = make_model_spec(f"model.num_layers={layers}", f"model.vocab_size={vocab_size}", seq_len=32)
    split = split_layers(spec, 32, stages)
    assert [layer for stage in split for layer in stage] == list(range(layers)) and all(split)
    best = min(
        max(compute_cost(spec, 32, range(a, b)) for a, b in itertools.pairwise((0, *cuts, layers)))
        for cuts in itertools.combinations(range(1, layers), stages - 1)
    )
    assert max(compute_cost(spec, 32, stage) for stage in split) == best


def test_a_large_head_shortens_the_last_stage() -> None:
    spec = make_model_spec("model.num_layers=8", "model.vocab_size=5000", seq_len=32)
    split = split_layers(spec, 32, 2)
    assert len(split[1]) < len(split[0])
    with pytest.raises(ValueError, match="9 stages of 8 layers"):
        split_layers(spec, 32, 9)
