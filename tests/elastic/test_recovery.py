"""Recovery policy: members, ranks, layout and step of the next generation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.elastic.recovery import Candidate, Membership, get_min_workers, plan_membership
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.planner.layout import Batching

BATCH = Batching(12, 2)


def make_config(*overrides: str) -> Config:
    return load_config(None, ["train.global_batch_size=24", "train.micro_batch_size=2", *overrides])


def parse_workers(text: str, num_parts: int = 1) -> list[Candidate]:
    """Return one candidate per word: "a:7,8 a:1/8 b:" are three workers on two nodes with the steps they hold.

    A step is of state part 0 unless a part is given before it.
    """
    candidates = []
    for number, description in enumerate(text.split()):
        node, states = description.split(":")
        parts_and_steps = [("0/" + state).split("/")[-2:] for state in states.split(",") if state]
        states = tuple(StatePart(1, int(part), num_parts, int(step)) for part, step in parts_and_steps)
        candidates.append(Candidate(number, node, 100 + number, states))
    return candidates


def get_sizes(membership: Membership) -> tuple[int, int, int]:
    layout = membership.layout
    return layout.world_size, layout.dp_replicate, layout.dp_shard


def test_replicas_resume_from_the_newest_step_that_any_holds() -> None:
    membership = plan_membership(make_config(), BATCH, parse_workers("a:7,8 a:8,9 b:8,9"), max_workers=4)
    assert membership is not None
    assert get_sizes(membership) == (3, 3, 1) and membership.members == (0, 1, 2) and membership.step == 9


@pytest.mark.parametrize(
    ("left_workers", "step"),
    [
        ("a:0/7,0/8 a:1/8,1/9", 8),
        ("a:0/8,0/9 a:1/7,1/8,0/8", 8),
        ("a:0/9,1/7 b:1/8,0/8", 8),
        ("a:0/8 a:0/8", None),
        ("a:0/9 a:1/8", None),
    ],
)
def test_shards_resume_from_the_newest_complete_step(left_workers: str, step: int | None) -> None:
    membership = plan_membership(
        make_config("parallel.zero=3"), BATCH, parse_workers(left_workers, num_parts=2), max_workers=4
    )
    assert membership is not None and membership.step == step


def test_the_only_holder_of_a_part_is_a_member() -> None:
    workers = parse_workers("a:0/5 a:0/5 a:1/5 a:0/5", num_parts=2)
    membership = plan_membership(make_config("parallel.zero=3"), BATCH, workers, max_workers=2)
    assert membership is not None and 2 in membership.members and membership.step == 5


def test_workers_without_state_do_not_affect_the_step() -> None:
    membership = plan_membership(make_config(), BATCH, parse_workers("a: a:8,9 a:9"), max_workers=3)
    assert membership is not None and membership.step == 9 and get_sizes(membership)[0] == 3
    membership = plan_membership(make_config(), BATCH, parse_workers("a: a: a:"), max_workers=3)
    assert membership is not None and membership.step is None


def test_workers_with_state_are_preferred_to_spares() -> None:
    membership = plan_membership(make_config(), BATCH, parse_workers("b: a: a:4 b:4 b:4"), max_workers=3)
    assert membership is not None and membership.members == (2, 3, 4)


def test_nodes_with_local_checkpoints_are_preferred_unless_there_is_state_in_memory() -> None:
    for memory, members in (("", (1, 2)), ("4", (0, 2))):  # of workers 0 and 2
        workers = parse_workers(f"a:{memory} b: c:{memory}")
        workers = [replace(worker, has_local_files=worker.worker_id > 0) for worker in workers]
        membership = plan_membership(make_config(), BATCH, workers, max_workers=2)
        assert membership is not None and membership.members == members


def test_world_size_stays_between_minimum_and_maximum() -> None:
    assert get_sizes(plan_membership(make_config(), BATCH, parse_workers("a:1 a:1 a:1 a:1"), max_workers=2)) == (
        2,
        2,
        1,
    )  # type: ignore[arg-type]
    assert plan_membership(make_config("cluster.min_workers=3"), BATCH, parse_workers("a:1 a:1"), max_workers=4) is None
    assert get_min_workers(make_config("parallel.tp=2")) == 2
    assert plan_membership(make_config("parallel.tp=2"), BATCH, parse_workers("a:1"), max_workers=4) is None


def test_a_tensor_parallel_group_stays_on_one_node() -> None:
    left = parse_workers("a:5 b:5 b:5")
    membership = plan_membership(make_config("parallel.tp=2"), BATCH, left, max_workers=4)
    assert membership is not None and membership.members == (1, 2) and membership.layout.tp == 2
    membership = plan_membership(make_config("parallel.tp=2"), BATCH, parse_workers("a:5 b:5 c:5"), max_workers=4)
    assert membership is None, "one worker per node makes no group of two"
    membership = plan_membership(make_config("parallel.tp=2"), BATCH, parse_workers("b:5 a:5 b:5 a:5"), max_workers=4)
    assert membership is not None and membership.members == (1, 3, 0, 2)


def test_model_parallel_axes_keep_their_size() -> None:
    membership = plan_membership(
        make_config("parallel.pp=2", "model.num_layers=4"), BATCH, parse_workers("a:5 " * 5), max_workers=6
    )
    assert membership is not None and membership.layout.pp == 2 and membership.layout.world_size == 4


def test_axes_chosen_for_a_number_of_workers_are_used() -> None:
    """Without a choice, the settings are; and if the chosen groups do not fit on the nodes."""
    wide = make_config("parallel.tp=2")
    workers = parse_workers("a:5 a:5 b:5 b:5")
    membership = plan_membership(make_config(), BATCH, workers, 4, choose_config={4: wide}.get)
    assert membership is not None and (membership.layout.tp, membership.config) == (2, wide)
    membership = plan_membership(make_config(), BATCH, workers[:3], 4, choose_config={4: wide}.get)
    assert membership is not None and (get_sizes(membership), membership.config) == ((3, 3, 1), None)
    scattered = parse_workers("a:5 b:5 c:5 d:5")
    membership = plan_membership(make_config(), BATCH, scattered, 4, choose_config={4: wide}.get)
    assert membership is not None and (get_sizes(membership), membership.config) == ((4, 4, 1), None)


@pytest.mark.parametrize(
    ("overrides", "num_left", "expected"),
    [
        (["parallel.zero=3"], 3, (3, 1, 3)),
        (["parallel.zero=3", "parallel.dp_shard=2"], 4, (4, 2, 2)),
        (["parallel.zero=3", "parallel.dp_shard=2", "parallel.dp_replicate=2"], 3, (3, 1, 3)),
        (["parallel.zero=3", "parallel.dp_shard=4"], 3, (3, 1, 3)),
        (["parallel.dp_replicate=4"], 3, (3, 3, 1)),
    ],
)
def test_data_parallel_axes_are_resized(overrides: list[str], num_left: int, expected: tuple[int, int, int]) -> None:
    membership = plan_membership(make_config(*overrides), BATCH, parse_workers("a:5 " * num_left), max_workers=6)
    assert membership is not None and get_sizes(membership) == expected


def test_a_rank_needs_a_microbatch() -> None:
    membership = plan_membership(
        make_config("train.micro_batch_size=12"), Batching(2, 12), parse_workers("a:5 " * 4), max_workers=4
    )
    assert membership is not None and get_sizes(membership) == (2, 2, 1)


@pytest.mark.parametrize(
    ("words", "cold", "members"),
    [
        ((), "", (0, 1, 2)),
        ((), "2", (0, 1)),
        ((), "12", (0,)),
        ((), "012", (0, 1, 2)),
        (("cluster.min_workers=2",), "12", (0, 1, 2)),
        (("parallel.tp=2", "cluster.workers=2"), "1", (0, 2)),
        (("parallel.tp=2", "cluster.workers=2"), "12", (0, 1)),
    ],
)
def test_cold_workers_are_members_only_if_no_layout_is_possible_without_them(
    words: tuple[str, ...], cold: str, members: tuple[int, ...]
) -> None:
    workers = [replace(w, is_cold=str(w.worker_id) in cold) for w in parse_workers("a:9 a: a:")]
    membership = plan_membership(make_config(*words), BATCH, workers, max_workers=3)
    assert membership is not None and membership.members == members


def test_a_cold_worker_is_a_member_if_state_would_be_lost_without_it() -> None:
    """Node b has a part of the state, and its tensor-parallel group needs the cold worker."""
    workers = parse_workers("a:0/5 a:0/5 b:1/5 b:", num_parts=2)
    workers[3] = replace(workers[3], is_cold=True)
    membership = plan_membership(make_config("parallel.tp=2"), BATCH, workers, max_workers=4)
    assert membership is not None and membership.step == 5 and sorted(membership.members) == [0, 1, 2, 3]
    older = [replace(worker, state_parts=worker.state_parts[:1]) for worker in parse_workers("a:4 a:4 b:4 b:4,5")]
    older[3] = replace(older[3], is_cold=True)
    kept = plan_membership(make_config("parallel.tp=2"), BATCH, older, max_workers=4)
    assert kept is not None and kept.step == 4 and sorted(kept.members) == [0, 1]


def hold_on_node(candidates: list[Candidate], node: str, *parts: StatePart) -> list[Candidate]:
    """Return the candidates, of which those on a node can open parts there."""
    return [replace(c, node_parts=parts) if c.node_id == node else c for c in candidates]


def test_new_workers_continue_from_what_their_node_holds() -> None:
    config = make_config("parallel.zero=3")
    parts = [StatePart(1, part, 2, step) for part in range(2) for step in (8, 9)]
    membership = plan_membership(config, BATCH, hold_on_node(parse_workers("a: a:"), "a", *parts), 2)
    assert membership is not None and membership.step == 9
    survivor = hold_on_node(parse_workers("a:0/8,0/9 a:", num_parts=2), "a", parts[2], parts[3])
    membership = plan_membership(config, BATCH, survivor, 2)
    assert membership is not None and membership.step == 9


def test_workers_on_the_node_that_holds_state_are_preferred_and_survivors_most() -> None:
    config = make_config("parallel.zero=3")
    held = StatePart(1, 1, 2, 9)
    candidates = hold_on_node(parse_workers("a: b: a: b:0/9 b:", num_parts=2), "b", held)
    membership = plan_membership(config, BATCH, candidates, 2)
    assert membership is not None and membership.step == 9
    assert 3 in membership.members and {candidates[member].node_id for member in membership.members} == {"b"}
    elsewhere = hold_on_node(parse_workers("a: b:0/9 c:", num_parts=2), "c", held)
    membership = plan_membership(config, BATCH, elsewhere, 2)
    assert membership is not None and (set(membership.members), membership.step) == ({1, 2}, 9)
