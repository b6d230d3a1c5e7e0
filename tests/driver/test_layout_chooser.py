"""Layouts that are chosen again for another number of workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_hpc.driver.auto_layout import resolve_auto_layout
from raytrain_hpc.driver.layout_chooser import LayoutChooser
from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.elastic.cluster_following import NodeCapacity
from raytrain_hpc.planner.layout import Batching, resolve_layout
from raytrain_hpc.planner.topology import Node, Topology
from tests.driver.cli_process import wait_until
from tests.warm_pool import make_small_config

CLUSTER = Topology((Node("n0", "10.0.0.1", 2),), "cpu")
NODES = [NodeCapacity("n0", 2, 0), NodeCapacity("n1", 0, 2)]
BATCHING = Batching(2, 6)


def make_chooser(directory: Path, *words: str) -> tuple[LayoutChooser, list[str]]:
    """Return the chooser of a run that has started on two workers, and the lines that it prints."""
    given = prepare_run(make_small_config(directory, "cluster.workers=auto", *words), None, lambda line: None)
    running = resolve_auto_layout(given, 2, CLUSTER, lambda line: None).config
    lines: list[str] = []
    backend: Any = SimpleNamespace(cluster=CLUSTER, world_size=2)
    return LayoutChooser(given, running, BATCHING, backend, lines.append), lines


def find_size(chooser: LayoutChooser, limit: int) -> int:
    """Wait until the number of workers that the planner has found is known, and return it."""
    wait_until(lambda: chooser.find_size(limit, NODES) > 0, timeout_s=20)
    return chooser.find_size(limit, NODES)


@pytest.mark.parametrize("limit", [4, 5])
def test_the_planner_chooses_for_the_nodes_that_there_are(tmp_path: Path, limit: int) -> None:
    """Two microbatches allow two data-parallel ranks: four workers are pairs of tensor-parallel ranks."""
    chooser, lines = make_chooser(tmp_path, "parallel.tp=[1,2]")
    assert chooser.get(4) is None
    assert chooser.find_size(2, NODES[:1]) == 2 and chooser.get(2) is None, "those of the run"
    assert find_size(chooser, limit) == 4
    config = chooser.get(4)
    assert config is not None
    layout = resolve_layout(config, 4)
    assert (layout.tp, layout.dp_size) == (2, 2)
    assert (config.train.micro_batch_size, config.train.dtype) == (BATCHING.size, "fp32")
    assert lines[0].startswith("planned tp: ")


def test_nothing_is_searched_if_nothing_is_left_to_choose(tmp_path: Path) -> None:
    chooser, lines = make_chooser(tmp_path)
    assert chooser.find_size(4, NODES) == 0
    assert chooser.get(4) is None and lines == []
