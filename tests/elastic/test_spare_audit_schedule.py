"""Audits by spares: which ranks are audited when, in which layout of spares, and who provides the weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_hpc.elastic.audit_schedule import AuditSchedule, count_ranks_per_unit
from raytrain_hpc.elastic.shard_holders import ShardHolders
from raytrain_hpc.elastic.spare_audit_schedule import (
    SpareAuditSchedule,
    choose_spare_interval,
    get_unit_layout,
    list_more_audits,
)
from raytrain_hpc.planner.layout import Layout
from tests.warm_pool import make_small_config

LAYOUTS = [
    Layout(dp_replicate=5),
    Layout(dp_shard=3, zero=2),
    Layout(dp_replicate=2, dp_shard=4, zero=3),
    Layout(dp_replicate=3, tp=2, cp=2, pp=2),
    Layout(dp_replicate=4, ep=2),
    Layout(dp_shard=4, zero=3, ep=2),
    Layout(dp_replicate=2, dp_shard=2, zero=1, ep=4),
    Layout(dp_replicate=2, cp=2, ep=4, tp=2),
]
SETTINGS = {
    "fp32": [],
    "bf16": ["train.dtype=bf16"],
    "tiles": ["parallel.tile_mib=1", "parallel.zero=3", "train.compile=true"],
}


def make_schedule(layout: Layout, *words: str) -> SpareAuditSchedule:
    config = make_small_config(None, "train.deterministic=elastic", *words)
    microbatches = tuple(range(2 * rank, 2 * rank + 2) for rank in range(layout.dp_size))
    schedule = AuditSchedule(3, 1, microbatches, count_ranks_per_unit(layout))
    by_ranks = replace(schedule, interval=0)
    return SpareAuditSchedule(schedule, by_ranks, layout, get_unit_layout(config, layout))


def test_a_step_that_ranks_audit_is_sampled_one_step_later() -> None:
    schedule = make_schedule(Layout(dp_replicate=2))
    schedule = replace(schedule, by_ranks=replace(schedule.schedule, interval=6, more_steps=frozenset([8])))
    assert [step + 1 for step in range(24) if schedule.is_due(step)] == [3, 7, 10, 13, 15, 19, 21]


@pytest.mark.parametrize("words", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_every_rank_is_audited_at_its_own_place(layout: Layout, words: list[str]) -> None:
    """Spares have the coordinates of the ranks that they audit, but for data parallelism."""
    schedule, audited = make_schedule(layout, *words), set[int]()
    for step in range(2, 3 * layout.dp_size + 2, 3):
        assert schedule.is_due(step) and not schedule.is_due(step + 1)
        audit = schedule.plan(step)
        audited.update(audit.ranks)
        for rank, audited_rank in enumerate(audit.ranks):
            own, other = audit.layout.get_coordinates(rank), layout.get_coordinates(audited_rank)
            assert [own[axis] for axis in ("pp", "cp", "tp")] == [other[axis] for axis in ("pp", "cp", "tp")]
            of_experts = audit.layout.get_expert_coordinates(rank), layout.get_expert_coordinates(audited_rank)
            assert of_experts[0]["ep"] == of_experts[1]["ep"]
            dp_rank = layout.get_dp_rank(audited_rank)
            assert audit.microbatches[audit.layout.get_dp_rank(rank)] in schedule.schedule.microbatches_by_rank[dp_rank]
    assert audited == set(range(layout.world_size))


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_sources_have_all_weights_and_come_from_another_replica(layout: Layout) -> None:
    schedule, holders = make_schedule(layout), ShardHolders(layout)
    for step in range(2, 3 * layout.dp_size + 2, 3):
        audit = schedule.plan(step)
        for kind in holders.kinds:
            places = {holders.get_place(kind, rank)[:2] for rank in range(layout.world_size)}
            assert {holders.get_place(kind, rank)[:2] for rank in audit.sources} == places
        if layout.dp_replicate > 1 and layout.ep == 1:
            assert set(audit.ranks).isdisjoint(audit.sources)


@pytest.mark.parametrize(
    ("words", "layout", "num_spares"),
    [
        ([], Layout(dp_shard=4, zero=3), 1),
        (["train.dtype=bf16"], Layout(dp_shard=4, zero=3), 1),
        (["train.dtype=bf16"], Layout(dp_replicate=4), 1),
        (["parallel.zero=3", "parallel.tile_mib=1"], Layout(dp_replicate=2, dp_shard=4, zero=3), 1),
        (["parallel.zero=3", "parallel.tile_mib=1", "train.compile=true"], Layout(dp_shard=4, zero=3), 2),
        (["train.dtype=bf16"], Layout(dp_shard=4, zero=1, tp=2, pp=2), 4),
        ([], Layout(dp_replicate=4, ep=4, cp=2), 4),
    ],
)
def test_as_few_spares_as_have_the_same_bits(words: list[str], layout: Layout, num_spares: int) -> None:
    config = make_small_config(None, "train.deterministic=elastic", *words)
    assert get_unit_layout(config, layout).world_size == num_spares


def test_interval_needs_audits_and_spares() -> None:
    def choose(*words: str) -> int:
        return choose_spare_interval(make_small_config(None, "train.deterministic=elastic", *words))

    assert choose("fault.audit_interval=auto") == choose("cluster.spares=1") == 0
    both = ("fault.audit_interval=auto", "cluster.spares=1")
    assert choose(*both, "fault.spare_audit_interval=7") == 7 and choose(*both, "fault.spare_audit_interval=0") == 0
    assert choose(*both) > 1 and choose("fault.audit_interval=1", "cluster.spares=1") == 0


@pytest.mark.parametrize(("start", "disputed"), [(8, 8), (8, 11), (0, 0)])
def test_after_a_dispute_ranks_audit_a_step_at_once_and_sample_the_disputed_one(start: int, disputed: int) -> None:
    """Also if the sample was delayed by an audit of ranks, after whose step the run starts again."""
    more = list_more_audits(start, disputed)
    by_ranks = AuditSchedule(8, 1, (range(1), range(1, 2)), more_steps=more)
    delayed = disputed % 8 == 0
    spare_schedule = replace(by_ranks, interval=8 if delayed else 3, more_steps=frozenset())
    schedule = SpareAuditSchedule(spare_schedule, by_ranks, Layout(dp_replicate=2), Layout())
    if disputed == 0:
        schedule = replace(schedule, schedule=replace(spare_schedule, interval=1))
    assert schedule.is_due(disputed) and not by_ranks.is_due(disputed)
    assert any(by_ranks.is_due(step) for step in (start, start + 1))
    assert list_more_audits(start, None) == frozenset()
