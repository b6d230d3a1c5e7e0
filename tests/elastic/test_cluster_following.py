"""Policy of a run that follows its cluster: target, reservations on nodes, and the time of growth."""

from __future__ import annotations

from math import inf

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.elastic.cluster_following import (
    ARRIVAL_PATIENCE_S,
    FollowRules,
    NodeCapacity,
    choose_target,
    is_growth_due,
    limit_capacity,
    make_follow_rules,
    plan_reservations,
)
from raytrain_hpc.elastic.recovery import find_legal_size
from raytrain_hpc.planner.layout import Batching


def parse_nodes(text: str) -> list[NodeCapacity]:
    """Return one node per word: "2+1" holds two slots and has one free; "2+1!" is draining."""
    nodes = []
    for number, word in enumerate(text.split()):
        held, free = word.rstrip("!").split("+")
        nodes.append(NodeCapacity(f"n{number}", int(held), int(free), word.endswith("!")))
    return nodes


def choose(text: str, *overrides: str, requested: int | None = None, microbatches: int = 12) -> int:
    """Return the target of a run with these nodes and settings."""
    config = load_config(None, ["train.global_batch_size=24", *overrides])
    return choose_target(
        parse_nodes(text),
        make_follow_rules(config),
        lambda limit: find_legal_size(config, Batching(microbatches, 24 // microbatches), limit),
        requested,
    )


@pytest.mark.parametrize(
    ("nodes", "overrides", "target"),
    [
        ("2+0", [], 2),
        ("2+0 0+2", [], 4),
        ("2+0 2+0!", [], 2),
        ("2+0 0+2!", [], 2),
        ("", ["cluster.min_workers=2"], 2),
        ("2+0 0+8", ["cluster.max_workers=5"], 5),
        ("2+0 0+8", ["cluster.max_workers=0"], 10),
        ("2+0 0+2", ["cluster.spares=1"], 3),
        ("3+0 0+3", ["parallel.tp=2"], 4),
        ("0+5", ["parallel.pp=2", "model.num_layers=4"], 4),
    ],
)
def test_the_target_is_what_the_cluster_has_room_for(nodes: str, overrides: list[str], target: int) -> None:
    assert choose(nodes, *overrides) == target


def test_the_target_is_at_most_a_worker_per_microbatch() -> None:
    assert choose("2+0 0+8", microbatches=3) == 3


def test_an_explicit_number_wins() -> None:
    assert choose("2+0 0+8", requested=1) == 1
    assert choose("2+0", requested=6) == 6, "its workers start when there is room"


def test_an_explicit_number_is_within_the_allowance() -> None:
    rules, nodes = FollowRules(minimum=2, maximum=None, spares=1), parse_nodes("6+0")
    assert [choose_target(nodes, rules, lambda limit: limit, 5, allowed) for allowed in (None, 8, 4, 1)] == [5, 5, 3, 2]


def test_slots_within_an_allowance_are_those_held_on_the_fullest_nodes() -> None:
    def limit(text: str, count: int) -> str:
        nodes = limit_capacity(parse_nodes(text), count)
        return " ".join(f"{node.held}+{node.free}{'!' * node.is_draining}" for node in nodes)

    assert limit("1+1 2+0 0+4", 2) == "0+0 2+0 0+0"
    assert limit("1+1 2+0 0+4", 4) == "1+1 2+0 0+0"
    assert limit("1+1 2+0! 0+4", 9) == "1+1 2+0! 0+4"


def test_reservations_complete_the_fullest_nodes() -> None:
    assert plan_reservations(parse_nodes("2+0 0+2 1+3"), 6, 1) == {"n2": 3}
    assert plan_reservations(parse_nodes("2+0 0+2 1+3"), 8, 1) == {"n1": 2, "n2": 3}
    assert plan_reservations(parse_nodes("2+0 0+2"), 2, 1) == {}
    assert plan_reservations(parse_nodes("2+0! 0+2"), 2, 1) == {"n1": 2}, "slots on a draining node do not count"
    assert plan_reservations(parse_nodes("0+3 0+2"), 4, 2) == {"n0": 2, "n1": 2}


RULES = FollowRules(minimum=1, maximum=None, interval_s=60.0)


@pytest.mark.parametrize(
    ("next_size", "since_arrival_s", "since_growth_s", "is_exempt", "due"),
    [
        (4, 0.0, inf, False, True),
        (3, 0.0, inf, False, False),
        (3, ARRIVAL_PATIENCE_S, inf, False, True),
        (4, 0.0, 59.0, False, False),
        (4, 0.0, 60.0, False, True),
        (3, 0.0, 0.0, True, True),
    ],
)
def test_growth_waits_for_all_new_workers_and_for_the_interval(
    next_size: int, since_arrival_s: float, since_growth_s: float, is_exempt: bool, due: bool
) -> None:
    assert due == is_growth_due(
        next_size, 4, RULES, since_arrival_s=since_arrival_s, since_growth_s=since_growth_s, is_exempt=is_exempt
    )
