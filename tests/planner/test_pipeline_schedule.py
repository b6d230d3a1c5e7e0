"""Pipeline schedules against torch's own, and simulated times against the published closed forms."""

from __future__ import annotations

import itertools
import warnings
import xml.etree.ElementTree as ElementTree

import pytest

from raytrain_hpc.planner.pipeline_schedule import SCHEDULE_NAMES, Action, PipelineSchedule
from raytrain_hpc.planner.pipeline_timeline import (
    compute_bubble_s,
    compute_idle_fraction,
    count_max_in_flight,
    render_svg,
    simulate,
)
from raytrain_hpc.planner.stage_split import split_layers
from tests.model_specs import make_model_spec

SCHEDULES = [
    PipelineSchedule(name, ranks, per_rank)
    for name, ranks in itertools.product(SCHEDULE_NAMES, (2, 3, 4, 5, 8))
    for per_rank in ({"gpipe": (1,), "1f1b": (1,), "zbv": (2,)}.get(name, (1, 2, 3)))
]
BIG = [(4, 8), (4, 16), (3, 9), (8, 32)]


def counts(schedule: PipelineSchedule) -> list[int]:
    return [m for m in range(1, 20) if schedule.find_conflict(m) is None]


def torchs_orders(schedule: PipelineSchedule, microbatches: int) -> list[list[str]]:
    """The tables of torch.distributed.pipelining, made without stages or process groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining import schedules as theirs
    kinds = {
        "gpipe": theirs.ScheduleGPipe,
        "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
        "interleaved_zero_bubble": theirs.ScheduleInterleavedZeroBubble,
        "zbv": theirs.ScheduleZBVZeroBubble,
    }
    made = kinds[schedule.name].__new__(kinds[schedule.name])
    made._n_microbatches, made._num_stages, made.num_stages = microbatches, schedule.num_stages, schedule.num_stages
    made.pp_group_size, made.n_local_stages = schedule.num_ranks, schedule.stages_per_rank
    made.number_of_rounds = max(1, microbatches // schedule.num_ranks)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    if schedule.name == "gpipe":
        table = made._get_pipeline_order()
    else:
        table = {rank: made._calculate_single_rank_operations(rank) for rank in range(schedule.num_ranks)}
    return [[str(a) for a in table[rank] if a is not None and a.microbatch_index is not None] for rank in table]


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s.name != "1f1b"], ids=str)
def test_orders_are_those_of_torch(schedule: PipelineSchedule) -> None:
    for microbatches in counts(schedule):
        mine = [[str(action) for action in order] for order in schedule.build_orders(microbatches)]
        assert mine == torchs_orders(schedule, microbatches), microbatches


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_order_ends_and_does_everything_once(schedule: PipelineSchedule) -> None:
    for microbatches in counts(schedule):
        kinds = "FIW" if schedule.splits_backward else "FB"
        all_of_it = {Action(k, s, m) for k in kinds for s in range(schedule.num_stages) for m in range(microbatches)}
        for orders, wanted in (
            (schedule.build_orders(microbatches), all_of_it),
            (schedule.build_forward_orders(microbatches), {a for a in all_of_it if a.kind == "F"}),
        ):
            spans = simulate(orders, lambda action: 1.0, schedule.num_stages)
            assert {span.action for span in spans} == wanted
            assert sum(map(len, orders)) == len(wanted)
            assert all(schedule.get_rank_of_stage(span.action.stage) == span.rank for span in spans)


def test_a_wrong_order_is_found() -> None:
    orders = [(Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0))]
    with pytest.raises(ValueError, match="wait at 0B0, 1F0"):
        simulate(orders, lambda action: 1.0, 2)


@pytest.mark.parametrize(("p", "m"), BIG)
@pytest.mark.parametrize("forward_s, backward_s", [(1.0, 2.0), (3.0, 1.0)])
def test_bubbles_of_schedules_that_do_not_split(p: int, m: int, forward_s: float, backward_s: float) -> None:
    """Narayanan et al. 2021, arXiv 2104.04473: (p - 1) / m of ideal time, (p - 1) / (v m) interleaved."""
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3)):
        schedule = PipelineSchedule(name, p, v)
        times = {"F": forward_s / v, "B": backward_s / v}
        spans = simulate(schedule.build_orders(m), lambda a, times=times: times[a.kind], schedule.num_stages)
        bubble = (p - 1) / v * (forward_s + backward_s)
        assert compute_bubble_s(spans) == pytest.approx(bubble)
        assert compute_idle_fraction(spans, p) == pytest.approx(bubble / (m * (forward_s + backward_s) + bubble))


@pytest.mark.parametrize(("p", "m"), BIG)
def test_bubbles_of_schedules_that_split(p: int, m: int) -> None:
    """Qi et al. 2023, arXiv 2401.10241: (p - 1)(TF + TB - TW) for ZB-H1, none for ZB-V where all times are equal."""
    forward_s, inputs_s, weights_s = 1.0, 1.25, 0.75
    times = {"F": forward_s, "I": inputs_s, "W": weights_s}
    h1 = PipelineSchedule("interleaved_zero_bubble", p, 1)
    spans = simulate(h1.build_orders(m), lambda action: times[action.kind], h1.num_stages)
    assert compute_bubble_s(spans) == pytest.approx((p - 1) * (forward_s + inputs_s - weights_s))
    zbv = PipelineSchedule("zbv", p, 2)
    assert compute_bubble_s(simulate(zbv.build_orders(m), lambda action: 1.0, zbv.num_stages)) == pytest.approx(0.0)


@pytest.mark.parametrize(("p", "m"), BIG)
def test_microbatches_in_flight(p: int, m: int) -> None:
    """1F1B: min(m, p - i) on rank i (Narayanan et al. 2021, arXiv 2006.09503); interleaved, in stages of 1/v of a
    rank's layers, v p + p - 1 on the first (Korthikanti et al. 2022, arXiv 2205.05198); ZB-V: no more than 1F1B's."""
    orders = PipelineSchedule("1f1b", p).build_orders(m)
    assert [count_max_in_flight(order)[i] for i, order in enumerate(orders)] == [min(m, p - i) for i in range(p)]
    assert [count_max_in_flight(order)[i] for i, order in enumerate(PipelineSchedule("gpipe", p).build_orders(m))] == [
        m
    ] * p
    for v in (2, 3):
        first = PipelineSchedule("interleaved_1f1b", p, v).build_orders(m)[0]
        assert at_once(first) == min(v * p + p - 1, v * m)
    assert max(at_once(order) for order in PipelineSchedule("zbv", p, 2).build_orders(m)) <= 2 * p


def at_once(order: tuple[Action, ...]) -> int:
    most = held = 0
    for action in order:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def test_a_transfer_takes_its_time() -> None:
    orders = PipelineSchedule("1f1b", 2).build_orders(1)
    spans = simulate(orders, lambda action: 1.0, 2, transfer_s=0.5)
    assert [(str(s.action), s.begin) for s in spans] == [("0F0", 0.0), ("1F0", 1.5), ("1B0", 2.5), ("0B0", 4.0)]


def test_the_picture_has_every_action() -> None:
    schedule = PipelineSchedule("zbv", 3, 2)
    spans = simulate(schedule.build_orders(6), lambda action: 1.0, schedule.num_stages)
    picture = ElementTree.fromstring(render_svg(spans, 3))
    drawn = [node[0].text.split()[0] for node in picture if node.tag.endswith("rect")]
    assert sorted(drawn) == sorted(str(span.action) for span in spans)
    assert any(f"idle {100 * compute_idle_fraction(spans, 3):.1f} %" in (node.text or "") for node in picture)


def cost(shape, seq_len: int, layers: range) -> int:
    layer = shape.layer_matrix_weights() + shape.hidden_size * seq_len
    ends = shape.hidden_size * (layers.start == 0) + shape.hidden_size * shape.vocab_size * (
        layers.stop == shape.num_layers
    )
    return len(layers) * layer + ends


@pytest.mark.parametrize(
    "layers, stages, vocabulary", [(7, 3, 65), (8, 4, 50257), (5, 5, 65), (9, 2, 2000), (6, 1, 65)]
)
def test_no_split_has_a_faster_slowest_stage(layers: int, stages: int, vocabulary: int) -> None:
    shape = make_model_spec(f"model.num_layers={layers}", f"model.vocab_size={vocabulary}", seq_len=32)
    made = split_layers(shape, 32, stages)
    assert [layer for stage in made for layer in stage] == list(range(layers)) and all(made)
    best = min(
        max(cost(shape, 32, range(a, b)) for a, b in itertools.pairwise((0, *cuts, layers)))
        for cuts in itertools.combinations(range(1, layers), stages - 1)
    )
    assert max(cost(shape, 32, stage) for stage in made) == best


def test_a_large_head_makes_the_last_stage_shorter() -> None:
    shape = make_model_spec("model.num_layers=8", "model.vocab_size=5000", seq_len=32)
    made = split_layers(shape, 32, 2)
    assert len(made[1]) < len(made[0])
    with pytest.raises(ValueError, match="9 stages of 8 layers"):
        split_layers(shape, 32, 9)
