"""Which workers go on, as which ranks of which layout, and from which step."""

from __future__ import annotations

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.elastic.recovery import Candidate, Membership, get_min_workers, plan_membership
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.planner.layout import Batching

BATCH = Batching(12, 2)


def config(*words: str) -> Config:
    return load_config(None, ["train.global_batch=24", "train.micro_batch=2", *words])


def workers(text: str, parts: int = 1) -> list[Candidate]:
    """ "a:7,8 a:1/8 b:" -> three workers on two nodes, by the steps that they hold: of part 0 if none is given."""
    found = []
    for number, word in enumerate(text.split()):
        node, states = word.split(":")
        held = [("0/" + state).split("/")[-2:] for state in states.split(",") if state]
        states = tuple(StatePart(1, int(part), parts, int(step)) for part, step in held)
        found.append(Candidate(number, node, 100 + number, states))
    return found


def sizes(formation: Membership) -> tuple[int, int, int]:
    layout = formation.layout
    return layout.world_size, layout.dp_replicate, layout.dp_shard


def test_replicas_go_on_from_the_newest_step_that_any_holds() -> None:
    formation = plan_membership(config(), BATCH, workers("a:7,8 a:8,9 b:8,9"), max_workers=4)
    assert formation is not None
    assert sizes(formation) == (3, 3, 1) and formation.members == (0, 1, 2) and formation.step == 9


@pytest.mark.parametrize(
    ("left", "step"),
    [
        ("a:0/7,0/8 a:1/8,1/9", 8),
        ("a:0/8,0/9 a:1/7,1/8,0/8", 8),
        ("a:0/9,1/7 b:1/8,0/8", 8),
        ("a:0/8 a:0/8", None),
        ("a:0/9 a:1/8", None),
    ],
)
def test_shards_go_on_from_a_step_of_which_all_are_there(left: str, step: int | None) -> None:
    formation = plan_membership(config("parallel.zero=3"), BATCH, workers(left, parts=2), max_workers=4)
    assert formation is not None and formation.step == step


def test_whoever_alone_holds_a_part_is_a_member() -> None:
    left = workers("a:0/5 a:0/5 a:1/5 a:0/5", parts=2)
    formation = plan_membership(config("parallel.zero=3"), BATCH, left, max_workers=2)
    assert formation is not None and 2 in formation.members and formation.step == 5


def test_who_holds_nothing_takes_no_part_in_that() -> None:
    formation = plan_membership(config(), BATCH, workers("a: a:8,9 a:9"), max_workers=3)
    assert formation is not None and formation.step == 9 and sizes(formation)[0] == 3
    formation = plan_membership(config(), BATCH, workers("a: a: a:"), max_workers=3)
    assert formation is not None and formation.step is None


def test_those_who_hold_state_come_before_spares() -> None:
    formation = plan_membership(config(), BATCH, workers("b: a: a:4 b:4 b:4"), max_workers=3)
    assert formation is not None and formation.members == (2, 3, 4)


def test_no_more_than_wanted_and_no_fewer_than_the_least() -> None:
    assert sizes(plan_membership(config(), BATCH, workers("a:1 a:1 a:1 a:1"), max_workers=2)) == (2, 2, 1)  # type: ignore[arg-type]
    assert plan_membership(config("cluster.min_workers=3"), BATCH, workers("a:1 a:1"), max_workers=4) is None
    assert get_min_workers(config("parallel.tp=2")) == 2
    assert plan_membership(config("parallel.tp=2"), BATCH, workers("a:1"), max_workers=4) is None


def test_a_tensor_parallel_group_stays_on_one_node() -> None:
    left = workers("a:5 b:5 b:5")
    formation = plan_membership(config("parallel.tp=2"), BATCH, left, max_workers=4)
    assert formation is not None and formation.members == (1, 2) and formation.layout.tp == 2
    formation = plan_membership(config("parallel.tp=2"), BATCH, workers("a:5 b:5 c:5"), max_workers=4)
    assert formation is None, "three workers on three nodes make no group"
    formation = plan_membership(config("parallel.tp=2"), BATCH, workers("b:5 a:5 b:5 a:5"), max_workers=4)
    assert formation is not None and formation.members == (1, 3, 0, 2)


def test_axes_that_cut_a_model_keep_their_size() -> None:
    formation = plan_membership(
        config("parallel.pp=2", "model.num_layers=4"), BATCH, workers("a:5 " * 5), max_workers=6
    )
    assert formation is not None and formation.layout.pp == 2 and formation.layout.world_size == 4


@pytest.mark.parametrize(
    ("words", "left", "expected"),
    [
        (["parallel.zero=3"], 3, (3, 1, 3)),
        (["parallel.zero=3", "parallel.dp_shard=2"], 4, (4, 2, 2)),
        (["parallel.zero=3", "parallel.dp_shard=2", "parallel.dp_replicate=2"], 3, (3, 1, 3)),
        (["parallel.zero=3", "parallel.dp_shard=4"], 3, (3, 1, 3)),
        (["parallel.dp_replicate=4"], 3, (3, 3, 1)),
    ],
)
def test_data_parallel_axes_are_fitted(words: list[str], left: int, expected: tuple[int, int, int]) -> None:
    formation = plan_membership(config(*words), BATCH, workers("a:5 " * left), max_workers=6)
    assert formation is not None and sizes(formation) == expected


def test_a_rank_needs_a_microbatch() -> None:
    formation = plan_membership(config("train.micro_batch=12"), Batching(2, 12), workers("a:5 " * 4), max_workers=4)
    assert formation is not None and sizes(formation) == (2, 2, 1)
