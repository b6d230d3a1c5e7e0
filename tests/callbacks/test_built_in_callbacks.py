"""Built-in callbacks, each against what it should do, computed in another way."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from raytrain_hpc import (
    EMA,
    CallbackError,
    CheckpointError,
    Config,
    ConfigError,
    EarlyStopping,
    GarbageCollection,
    KeepBest,
    MemorySnapshot,
    NvtxRanges,
    export_model,
    load_config,
    train,
)
from raytrain_hpc.callbacks import memory_snapshot
from raytrain_hpc.callbacks.callback import TrainingContext
from raytrain_hpc.callbacks.plugins import create_callbacks
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
from tests.callbacks.test_callback_state import LAYOUTS
from tests.training.generations import run_generation
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec

BASE = ["train.steps=6", "train.micro_batch_size=2", "train.deterministic=elastic", "eval.interval=2"]
DECAY = 0.7


def read_tensors(directory: Path, step: int, prefix: str) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a checkpoint whose names begin with a prefix."""
    checkpoint = CheckpointStore(directory / "checkpoints").find(step)
    assert checkpoint is not None
    tensors = {name: torch.empty(s.shape) for name, s in checkpoint.index.items() if name.startswith(prefix)}
    read_state(checkpoint, ShardedState(StateShard.from_tensor(name, tensor) for name, tensor in tensors.items()))
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def get_val_losses(records: list[dict[str, Any]]) -> list[float]:
    return [step["val/loss"] for step in get_step_metrics(records) if "val/loss" in step]


@pytest.fixture(scope="module")
def averaged_run(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One process with an average of the weights, and a checkpoint of every step."""
    directory = tmp_path_factory.mktemp("averaged")
    words = [*BASE, "checkpoint.interval=1", "checkpoint.keep=0"]
    (records,) = pool.train(make_small_config(directory, *words), callbacks=[EMA(DECAY)])
    return directory, records


def test_averages_are_those_of_the_formula(averaged_run: Any) -> None:
    """The weights of all steps, read from checkpoints, in double precision."""
    directory, _ = averaged_run
    steps = [read_tensors(directory, step, "model.") for step in range(1, 7)]
    averages = read_tensors(directory, 6, "callbacks.EMA.averaged_weights.")
    initial = read_tensors(directory, 1, "callbacks.EMA.averaged_weights.")
    assert averages.keys() == steps[0].keys()
    for name, average in averages.items():
        # The average of step 1 gives the initial weights: they are in no checkpoint.
        expected = initial[name].double()
        for weights in steps[1:]:
            expected = DECAY * expected + (1 - DECAY) * weights[name].double()
        assert torch.allclose(average.double(), expected, rtol=0, atol=1e-6)
        assert not torch.equal(average, steps[-1][name])


def test_training_is_not_changed_and_the_averages_are_evaluated(
    pool: WarmPool, averaged_run: Any, tmp_path: Path
) -> None:
    (plain,) = pool.train(make_small_config(tmp_path, *BASE))
    _, records = averaged_run
    assert [s["train/loss"] for s in get_step_metrics(records)] == [s["train/loss"] for s in get_step_metrics(plain)]
    assert all(a != b for a, b in zip(get_val_losses(records), get_val_losses(plain), strict=True))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_averages_are_equal_on_every_layout(pool: WarmPool, averaged_run: Any, tmp_path: Path, layout: str) -> None:
    """Bit for bit on data-parallel layouts, also after weights that a forward pass has gathered (ZeRO-1)."""
    records = pool.train(make_small_config(tmp_path, *BASE, *LAYOUTS[layout]), callbacks=[EMA(DECAY)])[0]
    losses, expected = get_val_losses(records), get_val_losses(averaged_run[1])
    train_losses = [step["train/loss"] for step in get_step_metrics(records)]
    if layout in ("tp-2", "pp-2"):
        assert losses == pytest.approx(expected, rel=1e-5)
        return
    assert losses == expected
    assert train_losses == [step["train/loss"] for step in get_step_metrics(averaged_run[1])]


@pytest.mark.parametrize("layout", ["ddp-3", "zero1-2", "zero3-3"])
def test_a_fault_during_an_evaluation_finds_weights_and_averages_in_their_places(
    pool: WarmPool, averaged_run: Any, layout: str
) -> None:
    """The evaluation after step 2 fails while the weights are exchanged; the next generation resumes from memory."""
    config = make_small_config(None, *BASE, *LAYOUTS[layout])
    world_size = int(config.cluster.workers)
    first = replace(make_worker_spec(config, world_size, steps_to=6), callbacks=(EMA(DECAY),))
    assert pool.call(run_until_evaluation_fails, world_size, first) == [2] * world_size
    second = replace(first, memory_step=2, generation=2)
    ranks = [*range(1, world_size), 0]
    results = pool.call(run_generation, world_size, [second], ranks, ())
    (records,) = [records for rank, _, _, records in results if rank == 0]
    losses = {step["step"]: step["train/loss"] for step in get_step_metrics(records)}
    assert losses == {s["step"]: s["train/loss"] for s in get_step_metrics(averaged_run[1]) if s["step"] > 2}
    assert get_val_losses(records) == get_val_losses(averaged_run[1])[1:]


def run_until_evaluation_fails(rank: int, rendezvous: Any, spec: Any) -> int:
    """Train in a process that keeps its snapshots, until its first evaluation. Return the newest step in memory."""
    import sys
    import types

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.snapshot.memory_store import SnapshotStore
    from raytrain_hpc.training.builder import build_trainer

    process_state = sys.modules.setdefault("state_kept_between_generations", types.ModuleType("process_state"))
    process_state.memory = SnapshotStore()
    trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel(), None, process_state.memory)
    evaluator = trainer.completion.evaluator
    evaluator.evaluate = None  # type: ignore[union-attr, method-assign, assignment]
    try:
        trainer.run(0, 6)
    except TypeError:
        process_state.memory.copy_live()
    return int(process_state.memory.steps[-1])


def test_a_run_that_continues_after_an_evaluation_trains_the_weights(pool: WarmPool, averaged_run: Any) -> None:
    """The checkpoint of step 4 is older than its evaluation, whose losses are known: its hooks are called again."""
    directory, records = averaged_run
    metrics = get_step_metrics(records)
    config = make_small_config(directory, *BASE)
    options = {"resume_step": 4, "start_metrics": next(step for step in metrics if step["step"] == 4)}
    (resumed,) = pool.train(config, callbacks=[EMA(DECAY)], **options)
    steps = [(step["step"], step["train/loss"], step.get("val/loss")) for step in get_step_metrics(resumed)]
    assert steps == [(step["step"], step["train/loss"], step.get("val/loss")) for step in metrics if step["step"] > 4]


def test_export_and_sampling_use_the_averages(averaged_run: Any, tmp_path: Path) -> None:
    directory, _ = averaged_run
    for weights, prefix in (("averaged", "callbacks.EMA.averaged_weights."), ("trained", "model.")):
        export_model(directory, tmp_path / weights, weights=weights)  # type: ignore[arg-type]
        model = AutoModelForCausalLM.from_pretrained(tmp_path / weights)
        expected = read_tensors(directory, 6, prefix)["embedding.weight"]
        assert torch.equal(model.get_input_embeddings().weight, expected)


def test_early_stopping_ends_a_run_that_stays_ended(tmp_path: Path) -> None:
    words = ["cluster.workers=0", "train.steps=40", "eval.interval=1", "optimizer.lr=0.000001"]
    config = make_small_config(tmp_path, *words)
    result = train(config, callbacks=[EarlyStopping(patience=2, min_delta=0.5)], quiet=True)
    assert (result.outcome, result.steps) == ("done", 3), "the first value is the best, two do not improve on it"
    assert result.val_loss is not None and result.checkpoint is not None
    metrics = (tmp_path / "metrics.jsonl").read_text()
    again = train(config, callbacks=[EarlyStopping(patience=2, min_delta=0.5)], quiet=True)
    assert (again.outcome, again.steps) == ("done", 3) and (tmp_path / "metrics.jsonl").read_text() == metrics
    assert train(config, quiet=True).steps == 40, "without the callback, the run continues"


def test_early_stopping_by_a_metric_of_training(pool: WarmPool, tmp_path: Path) -> None:
    config = make_small_config(tmp_path, "cluster.workers=2", "train.steps=9")
    callback = EarlyStopping("train/grad_norm", patience=1, min_delta=1e6, mode="max")
    records = pool.train(config, callbacks=[callback])
    assert [step["step"] for step in get_step_metrics(records[0])] == [1, 2]


def test_the_best_checkpoint_is_kept_and_found_by_its_label(tmp_path: Path) -> None:
    """Tokens are random and the rate is high, so the first evaluation is the best one."""
    words = ["cluster.workers=0", "train.steps=8", "eval.interval=1", "checkpoint.interval=1", "checkpoint.keep=1"]
    config = make_small_config(tmp_path, *words, "optimizer.lr=0.2", "lr_scheduler.name=constant")
    train(config, callbacks=[KeepBest(), KeepBest("train/loss", label="lowest")], quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    best = min(lines, key=lambda line: line["val/loss"])["step"]
    lowest = min(lines, key=lambda line: line["train/loss"])["step"]
    labels = CheckpointStore(tmp_path / "checkpoints").read_labels()
    assert labels == {"best": best, "lowest": lowest}
    assert CheckpointStore(tmp_path / "checkpoints").list_steps() == sorted({best, lowest, 8})
    assert CheckpointStore(tmp_path / "checkpoints").find("best").step == best  # type: ignore[union-attr]
    assert best < 8
    with pytest.raises(CheckpointError, match="no checkpoint has the label 'worst'; known labels: "):
        CheckpointStore(tmp_path / "checkpoints").find("worst")


def make_context(tmp_path: Path, device: str) -> TrainingContext:
    config: Config = make_small_config(tmp_path)
    return TrainingContext(config, 0, 1, 1, torch.device(device), 0, 4, print)


def test_ranges_are_nested_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    callback = NvtxRanges()
    callback.context = make_context(tmp_path, "cuda")
    callback.pre_step()
    callback.post_forward_backward()
    callback.pre_step()  # the step is recomputed
    callback.post_forward_backward()
    callback.pre_optim_step()
    callback.post_step({})
    callback.close()
    first = ["step 1", "forward_backward", "end", "reduce", "end", "end"]
    assert ranges == [*first, *first[:4], "end", "optimizer", "end", "end"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_memory_snapshot_is_written_after_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(memory_snapshot, "record_memory_history", lambda device, count: calls.append(count))
    monkeypatch.setattr(memory_snapshot, "dump_memory_snapshot", lambda device, path: calls.append(path))
    callback = MemorySnapshot([1, 3], max_entries=7)
    callback.context = make_context(tmp_path, device)
    for step in range(4):
        callback.context.step = step
        callback.pre_step()
        callback.context.step = step + 1
        callback.post_step({})
    callback.close()
    path = str(tmp_path / "memory" / "rank-00000-step-00000003.pickle")
    assert calls == ([7, path, None] if device == "cuda" else [])


def test_garbage_is_collected_at_fixed_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[tuple[int, bool]] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append((generation, gc.isenabled())) or 0)
    train(
        make_small_config(tmp_path, "cluster.workers=0", "train.steps=5"),
        callbacks=[GarbageCollection(2, generation=0)],
        quiet=True,
    )
    assert [entry for entry in collected if entry[0] == 0] == [(0, False), (0, False)] and gc.isenabled()


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: EMA(1.0), "decay=1.0"),
        (lambda: EarlyStopping(mode="low"), "mode='low'"),  # type: ignore[arg-type]
        (lambda: EarlyStopping(patience=0), "patience=0: needs at least 1"),
        (lambda: GarbageCollection(0), "interval=0"),
        (lambda: MemorySnapshot([3]), r"steps=\[3\]"),
    ],
)
def test_wrong_arguments_are_named(create: Any, message: str) -> None:
    with pytest.raises(CallbackError, match=message):
        create()


def test_callbacks_are_created_from_the_config() -> None:
    words = ["train.callbacks=[garbage_collection, {name: ema, args: {decay: 0.5}}, 'raytrain_hpc:KeepBest']"]
    kinds = [type(callback) for callback in create_callbacks(load_config(None, words))]
    assert kinds == [GarbageCollection, EMA, KeepBest]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("[emma]", "train.callbacks='emma' .*no such name; did you mean ema"),
        ("[{name: ema, args: {decoy: 1}}]", "train.callbacks='ema' .*cannot be created with args={'decoy': 1}"),
        ("['nowhere:X']", "train.callbacks='nowhere:X' .*cannot be imported: ModuleNotFoundError"),
        ("['json:dumps']", "train.callbacks='json:dumps' .*cannot be created"),
        ("['json:JSONDecoder']", "train.callbacks='json:JSONDecoder' .*neither a Callback nor a DriverCallback"),
    ],
)
def test_wrong_names_are_refused_in_one_line(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_callbacks(load_config(None, [f"train.callbacks={setting}"]))
