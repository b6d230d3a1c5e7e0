"""Actors on simulated Ray clusters are placed as planned: ranks that communicate most share a node."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.driver import simulated_placement

pytestmark = pytest.mark.timeout(200)
WORDS = ["model.hidden_size=256", "model.num_layers=4", "train.seq_len=64", "train.global_batch_size=32"]


def place_on_clusters(python: Path, *stages: tuple[str, list[list[str]]]) -> list[dict[str, Any]]:
    """Return what tests.driver.simulated_placement prints. Each stage: nodes to add, then settings to place."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0"}
    words = [
        word
        for nodes, settings in stages
        for word in (nodes, json.dumps([[*WORDS, *overrides] for overrides in settings]))
    ]
    command = [sys.executable, "-m", simulated_placement.__name__, str(python), *words]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert process.returncode == 0, process.stderr
    placements: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return placements


def find_nodes_of_groups(placement: dict[str, Any], *axes: str) -> list[set[str]]:
    """Return the nodes of each group of ranks that differ in these axes only."""
    groups: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for rank in placement["ranks"]:
        groups[tuple(coordinate for axis, coordinate in rank["at"].items() if axis not in axes)].add(rank["node_id"])
    return list(groups.values())


def test_placement_on_uneven_nodes(ray_python: Path) -> None:
    stages, with_spares, uneven = place_on_clusters(
        ray_python,
        (
            "4:,4:",
            [
                ["cluster.workers=8", "parallel.tp=2", "parallel.pp=2"],
                ["cluster.workers=6", "cluster.spares=2"],
            ],
        ),
        ("3:", [["cluster.workers=10", "parallel.tp=2", "train.global_batch_size=40"]]),
    )
    # Gradients are larger than the activations between stages: replicas share a node, stages do not.
    assert all(len(nodes) == 1 for nodes in find_nodes_of_groups(stages, "tp", "dp_replicate"))
    assert all(len(nodes) == 2 for nodes in find_nodes_of_groups(stages, "pp"))
    assert Counter(with_spares["spares"]) == dict.fromkeys(with_spares["slots"], 1), "one on each node"
    for placement in (stages, with_spares):
        assert Counter([rank["node_id"] for rank in placement["ranks"]] + placement["spares"]) == placement["slots"]
    assert all(len(nodes) == 1 for nodes in find_nodes_of_groups(uneven, "tp"))
    assert sorted(Counter(rank["node_id"] for rank in uneven["ranks"]).values()) == [2, 4, 4]


def test_placement_on_two_racks(ray_python: Path) -> None:
    four, eight = place_on_clusters(
        ray_python,
        (
            "2:a,2:b,2:a,2:b",
            [
                ["cluster.workers=4", "parallel.cp=2"],
                ["cluster.workers=8", "parallel.tp=2", "parallel.zero=3"],
            ],
        ),
    )
    assert len({rank["rack"] for rank in four["ranks"]}) == 1, "half of the cluster is one rack"
    assert all(len(nodes) == 1 for nodes in find_nodes_of_groups(four, "cp"))
    assert all(len(nodes) == 1 for nodes in find_nodes_of_groups(eight, "tp"))
    assert all(rank["rack"] == eight["racks"][rank["node_id"]] != "" for rank in eight["ranks"])
    ring = [rank["rack"] for rank in eight["ranks"]]
    assert sum(rack != next_rack for rack, next_rack in zip(ring, ring[1:], strict=False)) == 1, (
        "a rack, then the other"
    )
