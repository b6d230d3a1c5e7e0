"""Stops and aborts that arrive at a bad moment: the state is compared and saved, or stays in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import custom_module
from raytrain_hpc import Config
from raytrain_hpc.distributed.process_groups import GenerationAbortedError
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import CustomModel
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.training.builder import build_trainer
from raytrain_hpc.training.trainer import Trainer
from tests.training.normalized_bigram import NormalizedBigram, build_normalized_bigram
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec


def record_calls(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, calls: list[str]) -> None:
    """Append the name of every comparison of replicas and every checkpoint to `calls`."""

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return method(*arguments, **options)

        return call

    monkeypatch.setattr(ReplicaCheck, "compare", recording("compare", ReplicaCheck.compare))
    trainer.checkpointer.save = recording("save", trainer.checkpointer.save)  # type: ignore[method-assign]


def test_stop_during_an_evaluation_compares_replicas_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_small_config(tmp_path, "eval.interval=1", "checkpoint.interval=0", "fault.replica_check_interval=100")
    spec, control, calls = make_worker_spec(config, 1, steps_to=3), ControlChannel(), []
    trainer = build_trainer(spec, 0, torch.device("cpu"), None, control)
    record_calls(monkeypatch, trainer, calls)
    build = trainer.metrics.build

    def stop_after_the_step(*arguments: Any) -> Any:
        control.request("stop")  # after the all-reduce in which ranks agree on the requests of a step
        return build(*arguments)

    trainer.metrics.build = stop_after_the_step  # type: ignore[method-assign]
    assert trainer.run(0, 3) == "stopped"
    assert calls == ["compare", "save"]


@pytest.mark.parametrize("checkpoint_pending", [False, True])
def test_stop_during_a_pending_evaluation_saves_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_pending: bool
) -> None:
    config = make_small_config(tmp_path, "eval.interval=1", "checkpoint.interval=0")
    spec, control, calls = make_worker_spec(config, 1, steps_to=3), ControlChannel(), []
    spec = replace(spec, pending_eval_metrics={"step": 0}, has_pending_checkpoint=checkpoint_pending)
    trainer = build_trainer(spec, 0, torch.device("cpu"), None, control)
    record_calls(monkeypatch, trainer, calls)
    control.request("stop")
    assert trainer.run(0, 3) == "stopped"
    assert calls == ["save"]


def test_running_statistics_stay_equal_on_all_ranks_after_a_skipped_step(pool: WarmPool, tmp_path: Path) -> None:
    faults = ", ".join(["{kind: nan, rank: 1, step: 2}"] * 2)
    overrides = ["cluster.workers=2", "fault.on_nan=skip", "checkpoint.interval=1", f"fault.inject=[{faults}]"]
    custom = CustomModel(build_normalized_bigram, custom_module.loss)
    records = pool.train(make_small_config(tmp_path, *overrides), custom=custom)[0]  # compares replicas every step
    assert len(get_step_metrics(records)) == 5


def test_every_part_of_a_model_trains_in_training_mode(tmp_path: Path) -> None:
    modes: list[bool] = []

    def build_with_a_part_in_evaluation_mode(config: Config) -> NormalizedBigram:
        module = build_normalized_bigram(config)
        module.norm.eval().register_forward_pre_hook(lambda norm, inputs: modes.append(norm.training))
        return module

    custom = CustomModel(build_with_a_part_in_evaluation_mode, custom_module.loss)
    spec = make_worker_spec(make_small_config(tmp_path, "eval.interval=1"), 1, steps_to=2, custom=custom)
    build_trainer(spec, 0, torch.device("cpu"), None, ControlChannel()).run(0, 2)
    assert [mode for mode, _ in groupby(modes)] == [True, False, True, False]


class AbortedControl(ControlChannel):
    """A channel whose collectives are aborted when `abort_now` is set."""

    abort_now = False

    @property
    def is_aborted(self) -> bool:
        return self.abort_now


@pytest.mark.parametrize("during", ["callbacks", "update"])
def test_an_abort_around_the_update_loses_no_state(tmp_path: Path, during: str) -> None:
    """Before it the state of the last step stays published, and one that communicates nothing is complete."""
    config = make_small_config(tmp_path, "checkpoint.interval=0", "eval.interval=0")
    control, store = AbortedControl(), SnapshotStore()
    spec = make_worker_spec(config, 1, steps_to=3)
    trainer = build_trainer(spec, 0, torch.device("cpu"), None, control, snapshot_store=store)
    trainer.run(0, 1)
    assert trainer.snapshots.is_live_published
    owner, name = (trainer.callbacks, "run") if during == "callbacks" else (trainer.model_update, "update_weights")
    function = getattr(owner, name)

    def run_and_abort(*arguments: Any) -> Any:
        control.abort_now = during == "update" or arguments[0] == "pre_optim_step"
        return function(*arguments)

    setattr(owner, name, run_and_abort)
    if during == "callbacks":
        with pytest.raises(GenerationAbortedError):
            trainer.train_step(1)
        assert trainer.snapshots.is_live_published
    else:
        trainer.train_step(1)
