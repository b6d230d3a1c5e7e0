"""When checkpoints are saved: after a number of steps, or after ten minutes of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.training import checkpointer
from raytrain_hpc.training.loss_reduction import LossReducer, StepRequests
from tests.warm_pool import WarmPool, make_small_config


def list_saved_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval_s: float, *words: str) -> list[int]:
    import raytrain_hpc as rt

    monkeypatch.setattr(checkpointer, "AUTO_INTERVAL_S", interval_s)
    config = make_small_config(tmp_path, "cluster.workers=0", "train.steps=4", "checkpoint.keep=0", *words)
    rt.train(config, quiet=True)
    return CheckpointStore(Path(config.run.dir) / "checkpoints").list_steps()


def test_auto_saves_by_the_clock_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_saved_steps(tmp_path / "a", monkeypatch, 0.0, "checkpoint.interval=auto") == [1, 2, 3, 4]
    assert list_saved_steps(tmp_path / "b", monkeypatch, 600.0, "checkpoint.interval=auto") == [4]
    assert list_saved_steps(tmp_path / "c", monkeypatch, 0.0, "checkpoint.interval=3") == [3, 4]
    assert list_saved_steps(tmp_path / "d", monkeypatch, 0.0, "checkpoint.interval=0") == [4]


def reduce_requests(trainer: Any) -> list[bool]:
    """Let rank 1 alone ask for a checkpoint; return what the ranks agree on."""
    reducer: LossReducer = trainer.loss_reducer
    losses = torch.ones(reducer.num_local_microbatches, 2, dtype=torch.float64)
    asks = trainer.loss_reducer._context.rank == 1
    totals = reducer.reduce(losses, StepRequests(save=asks))
    loss, norm, requests = totals.read(torch.tensor(2.0, dtype=torch.float64))
    assert (loss, norm) == (1.0, 2.0)
    return [requests.stop, requests.pause, requests.save]


def test_all_ranks_save_when_the_clock_of_one_asks(pool: WarmPool) -> None:
    config = make_small_config(None, "cluster.workers=2")
    assert pool.inspect_trainers(reduce_requests, config) == [[False, False, True]] * 2
