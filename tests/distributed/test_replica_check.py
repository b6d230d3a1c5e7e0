"""A bit that flips on one replica: found at the next comparison, by all that should hold the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.elastic.load_balancing import UnevenBatching
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config, make_worker_spec

WORDS = ["train.steps=6", "train.micro_batch=2", "train.deterministic=elastic"]
FLIP = "fault.inject=[{kind: bitflip, rank: 1, step: 2}]"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster.workers=3"], "ranks 1 differ from their replicas; the others agree"),
        (["cluster.workers=2"], "ranks 1 differ from their replicas; as many hold the one as the other"),
        (["cluster.workers=4", "parallel.zero=3", "parallel.dp_shard=2"], "ranks 3 differ"),
    ],
)
def test_who_differs_is_named(pool: WarmPool, tmp_path: Path, words: list[str], said: str) -> None:
    flip = FLIP.replace("rank: 1", "rank: 3") if "parallel.zero=3" in words else FLIP
    with pytest.raises(RankFailedError, match=said):
        pool.train(make_small_config(tmp_path, *WORDS, *words, flip, "fault.compare_every=2"))


def test_a_save_is_of_what_replicas_agree_on(pool: WarmPool, tmp_path: Path) -> None:
    words = [*WORDS, "cluster.workers=2", FLIP, "checkpoint.every=3"]
    with pytest.raises(RankFailedError, match="ranks 1 differ"):
        pool.train(make_small_config(tmp_path / "a", *words, "fault.compare_every=100"))
    assert not list((tmp_path / "a" / "checkpoints").glob("step-*"))
    assert (
        get_step_metrics(pool.train(make_small_config(tmp_path / "b", *words, "fault.compare_every=0"))[0])[-1]["step"]
        == 6
    )


def losses(number: int, meeting: Any, spec: Any) -> list[float]:
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    control = ControlChannel()
    build_trainer(spec, number, torch.device("cpu"), meeting, control).run(0, spec.steps_to)
    return [metrics["train/loss"] for metrics in get_step_metrics(control.drain())]


@pytest.mark.parametrize("counts", [(1, 4, 1), (3, 1, 2)])
def test_shares_more_than_one_apart_change_no_bit(pool: WarmPool, counts: tuple[int, ...]) -> None:
    words = [*WORDS, "cluster.workers=3", "model.dropout=0.1"]
    even = [metrics["train/loss"] for metrics in get_step_metrics(pool.train(make_small_config(None, *words))[0])]
    spec = make_worker_spec(make_small_config(None, *words), 3, steps_to=6)
    uneven = replace(spec, batching=UnevenBatching(spec.batching.count, spec.batching.size, counts))
    assert pool.call(losses, 3, uneven)[0] == even
