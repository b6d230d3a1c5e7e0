"""Microbatches of a run that may grow."""

from __future__ import annotations

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.planner.layout import Batching, resolve_batching, resolve_layout


@pytest.mark.parametrize(
    ("words", "batching"),
    [
        ([], Batching(2, 12)),
        (["cluster.max_workers=6"], Batching(6, 4)),
        (["cluster.max_workers=5"], Batching(6, 4)),
        (["cluster.max_workers=0"], Batching(2, 12)),
        (["cluster.max_workers=100"], Batching(24, 1)),
        (["cluster.max_workers=6", "train.micro_batch_size=12"], Batching(2, 12)),
        (["cluster.max_workers=6", "cluster.workers=2"], Batching(2, 12)),
    ],
)
def test_there_are_microbatches_for_the_ranks_that_a_run_may_grow_to(words: list[str], batching: Batching) -> None:
    config = load_config(None, ["train.global_batch_size=24", *words])
    assert resolve_batching(config, resolve_layout(config, 2)) == batching


def test_ranks_of_a_model_replica_share_their_microbatches() -> None:
    words = ["train.global_batch_size=24", "parallel.tp=2", "cluster.max_workers=8"]
    config = load_config(None, words)
    assert resolve_batching(config, resolve_layout(config, 2)) == Batching(4, 6)
