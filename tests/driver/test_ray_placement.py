"""Actors on simulated Ray clusters are where the plan says, and the plan puts near what sends most."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.driver import simulated_placement

pytestmark = pytest.mark.timeout(200)
WORDS = ["model.hidden_size=256", "model.num_layers=4", "train.seq_len=64", "train.global_batch=32"]


def run(*stages: tuple[str, list[list[str]]]) -> list[dict[str, Any]]:
    """Return what tests.driver.simulated_placement prints. Each stage: nodes to add, then settings to place."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    words = [word for nodes, settings in stages for word in (nodes, json.dumps([[*WORDS, *one] for one in settings]))]
    command = [sys.executable, "-m", simulated_placement.__name__, *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def nodes_of(found: dict[str, Any], *axes: str) -> list[set[str]]:
    """The nodes of each group of ranks that differ in these axes alone."""
    groups: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for rank in found["ranks"]:
        groups[tuple(at for axis, at in rank["at"].items() if axis not in axes)].add(rank["node"])
    return list(groups.values())


def test_two_nodes_of_four_and_one_of_three() -> None:
    tensor, stages, spared, uneven, odd = run(
        (
            "4:,4:",
            [
                ["cluster.workers=8", "parallel.tp=4"],
                ["cluster.workers=8", "parallel.tp=2", "parallel.pp=2"],
                ["cluster.workers=6", "cluster.spares=2"],
            ],
        ),
        (
            "3:",
            [
                ["cluster.workers=10", "parallel.tp=2", "train.global_batch=40"],
                ["cluster.workers=11", "train.global_batch=44"],
            ],
        ),
    )
    assert all(len(nodes) == 1 for nodes in nodes_of(tensor, "tp"))
    # Gradients are more than what stages hand on: replicas share a node, stages do not.
    assert all(len(nodes) == 1 for nodes in nodes_of(stages, "tp", "dp_replicate"))
    assert all(len(nodes) == 2 for nodes in nodes_of(stages, "pp"))
    assert Counter(spared["spares"]) == dict.fromkeys(spared["slots"], 1), "one on each node"
    for found in (tensor, stages, spared):
        assert Counter([rank["node"] for rank in found["ranks"]] + found["spares"]) == found["slots"]
    assert all(len(nodes) == 1 for nodes in nodes_of(uneven, "tp"))
    assert sorted(Counter(rank["node"] for rank in uneven["ranks"]).values()) == [2, 4, 4]
    assert Counter(rank["node"] for rank in odd["ranks"]) == odd["slots"]


def test_four_nodes_of_two_on_two_racks() -> None:
    four, all_ = run(
        (
            "2:a,2:b,2:a,2:b",
            [
                ["cluster.workers=4", "parallel.cp=2"],
                ["cluster.workers=8", "parallel.tp=2", "parallel.zero=3"],
            ],
        )
    )
    assert len({rank["rack"] for rank in four["ranks"]}) == 1, "half of the cluster is one rack"
    assert all(len(nodes) == 1 for nodes in nodes_of(four, "cp"))
    assert all(len(nodes) == 1 for nodes in nodes_of(all_, "tp"))
    assert all(rank["rack"] == all_["racks"][rank["node"]] != "" for rank in all_["ranks"])
    ring = [rank["rack"] for rank in all_["ranks"]]
    assert sum(one != other for one, other in zip(ring, ring[1:], strict=False)) == 1, "a rack, then the other"
