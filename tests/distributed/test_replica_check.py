"""A flipped bit on one replica is detected at the next replica check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.elastic.load_balancing import UnevenBatching
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config, make_worker_spec

OVERRIDES = ["train.steps=6", "train.micro_batch_size=2", "train.deterministic=elastic"]
FLIP = "fault.inject=[{kind: bitflip, rank: 1, step: 2}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.workers=3"], "ranks 1 differ from their replicas; the other replicas agree"),
        (["cluster.workers=2"], "ranks 1 differ from their replicas; there is no majority"),
        (["cluster.workers=4", "parallel.zero=3", "parallel.dp_shard=2"], "ranks 3 differ"),
    ],
)
def test_ranks_that_differ_are_named(pool: WarmPool, tmp_path: Path, overrides: list[str], message: str) -> None:
    flip = FLIP.replace("rank: 1", "rank: 3") if "parallel.zero=3" in overrides else FLIP
    with pytest.raises(RankFailedError, match=message):
        pool.train(make_small_config(tmp_path, *OVERRIDES, *overrides, flip, "fault.replica_check_interval=2"))


def test_replicas_are_compared_before_a_checkpoint_unless_disabled(pool: WarmPool, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "cluster.workers=2", FLIP, "checkpoint.interval=3"]
    with pytest.raises(RankFailedError, match="ranks 1 differ"):
        pool.train(make_small_config(tmp_path / "a", *overrides, "fault.replica_check_interval=100"))
    assert not list((tmp_path / "a" / "checkpoints").glob("step-*"))
    records = pool.train(make_small_config(tmp_path / "b", *overrides, "fault.replica_check_interval=0"))
    assert get_step_metrics(records[0])[-1]["step"] == 6


def train(rank: int, rendezvous: Any, spec: Any) -> list[float]:
    """Train one rank. Return its losses."""
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    control = ControlChannel()
    build_trainer(spec, rank, torch.device("cpu"), rendezvous, control).run(0, spec.end_step)
    return [metrics["train/loss"] for metrics in get_step_metrics(control.drain())]


@pytest.mark.parametrize("counts", [(1, 4, 1), (3, 1, 2)])
def test_uneven_microbatch_counts_do_not_change_the_losses(pool: WarmPool, counts: tuple[int, ...]) -> None:
    overrides = [*OVERRIDES, "cluster.workers=3", "model.dropout=0.1"]
    records = pool.train(make_small_config(None, *overrides))
    even_losses = [metrics["train/loss"] for metrics in get_step_metrics(records[0])]
    spec = make_worker_spec(make_small_config(None, *overrides), 3, steps_to=6)
    uneven = replace(spec, batching=UnevenBatching(spec.batching.count, spec.batching.size, counts))
    assert pool.call(train, 3, uneven)[0] == even_losses
