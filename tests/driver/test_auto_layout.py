"""What is left to the planner is chosen for the cluster that is there, once."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_hpc.driver.auto_layout import resolve_auto_layout
from raytrain_hpc.driver.run_setup import PreparedRun, prepare_run
from raytrain_hpc.planner.topology import Node, Topology
from tests.warm_pool import make_small_config

WIDE = ["model.hidden_size=4096", "model.num_layers=32", "model.num_heads=32", "train.seq_len=2048"]
LARGE = [*WIDE, "train.global_batch=64", "train.dtype=bf16"]


def cluster(*slots: int, device: str = "cuda", accelerator: str = "h100") -> Topology:
    return Topology(tuple(Node(f"n{i}", f"10.0.0.{i}", count) for i, count in enumerate(slots)), device, accelerator)


def prepared(*words: str) -> PreparedRun:
    return prepare_run(make_small_config(None, *words), None, lambda line: None)


def test_on_accelerators_what_was_not_said_is_chosen() -> None:
    lines: list[str] = []
    run = prepared(*LARGE, "cluster.workers=16")
    chosen = resolve_auto_layout(run, 16, cluster(8, 8), lines.append)
    layout, batching = chosen.resolve_layout(16)
    assert layout.world_size == 16 and layout.tp <= 8
    assert layout.zero > 0 or layout.tp * layout.pp > 1, "6.6 B parameters are too many for a device"
    assert batching.size * batching.count == 64
    assert "planned" in lines[0] and "fits" in lines[0] and "expected" in lines[1]
    assert run.config.parallel.tp == 1, "the settings as they were given are another object"


def test_on_cpus_nothing_is_unless_asked_for() -> None:
    run = prepared("cluster.workers=4")
    assert resolve_auto_layout(run, 4, cluster(4, device="cpu"), pytest.fail) is run
    asked = prepared("cluster.workers=4", "parallel.tp=[2]", "parallel.zero=[1]")
    layout, _ = resolve_auto_layout(asked, 4, cluster(2, 2, device="cpu"), lambda line: None).resolve_layout(4)
    assert (layout.tp, layout.zero, layout.dp_shard) == (2, 1, 2)


def test_uneven_nodes_are_taken_for_smaller_even_ones() -> None:
    chosen = resolve_auto_layout(prepared(*LARGE, "cluster.workers=12"), 12, cluster(8, 4), lambda line: None)
    layout, _ = chosen.resolve_layout(12)
    assert 4 % layout.tp == 0


def test_a_batch_that_is_cut_already_stays_cut() -> None:
    run = prepared(*LARGE, "cluster.workers=8")
    stored = PreparedRun(**{**vars(run), "stored": run.resolve_layout(8)[1]})
    assert (
        resolve_auto_layout(stored, 8, cluster(8), lambda line: None).config.train.micro_batch
        == stored.stored_batching.size
    )  # type: ignore[union-attr]


def test_too_large_a_model_is_warned_of_and_not_refused() -> None:
    lines: list[Any] = []
    resolve_auto_layout(prepared(*LARGE, "model.num_layers=200", "cluster.workers=1"), 1, cluster(1), lines.append)
    assert "does not fit" in lines[0] and any("may run out of memory" in line for line in lines)


def test_a_device_that_nobody_knows_is_said_to_be_taken_for_another() -> None:
    lines: list[str] = []
    resolve_auto_layout(prepared(*LARGE, "cluster.workers=8"), 8, cluster(8, accelerator=""), lines.append)
    assert "on every device taken for an h100" in lines[0]
