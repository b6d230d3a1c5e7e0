"""State of callbacks: it travels in checkpoints and in memory, to any layout, and is exact after a recovery."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc import train
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, ShardedState, StateShard
from tests.callbacks.recording_callbacks import Counters, FailingCounter, FixedState, Requester, get_notes
from tests.training.generations import run_generation
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config, make_worker_spec

BASE = ["train.steps=6", "train.micro_batch_size=2", "train.deterministic=elastic", "checkpoint.interval=3"]
LAYOUTS = {
    "one": ["cluster.workers=1"],
    "ddp-3": ["cluster.workers=3"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
    "hsdp-2x2": ["cluster.workers=4", "parallel.zero=3", "parallel.dp_replicate=2", "parallel.dp_shard=2"],
    "tp-2": ["cluster.workers=2", "parallel.tp=2"],
    "pp-2": ["cluster.workers=2", "parallel.pp=2"],
}


def get_final_state(records: list[dict[str, Any]]) -> str:
    return next(line for line in get_notes(records) if line.startswith("end: "))


def read_sums(directory: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the tensors per parameter in a checkpoint, whole."""
    checkpoint = CheckpointStore(directory / "checkpoints").find(step)
    assert checkpoint is not None
    tensors = {}
    for name, slices in checkpoint.index.items():
        if name.startswith("callbacks.Counters.sums."):
            tensor = torch.empty(slices.shape, dtype=TORCH_DTYPES[slices.dtype])
            read_state(checkpoint, ShardedState([StateShard.from_tensor(name, tensor)]))
            tensors[name.removeprefix("callbacks.Counters.sums.")] = tensor
    return tensors


@pytest.fixture(scope="module")
def undisturbed(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    directory = tmp_path_factory.mktemp("undisturbed")
    (records,) = pool.train(make_small_config(directory, *BASE, *LAYOUTS["one"]), callbacks=[Counters()])
    return get_final_state(records), read_sums(directory, 6)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("one", "tp-2", "pp-2")])
@pytest.mark.parametrize("resumed", ["one", "zero3-3"])
def test_state_moves_through_a_checkpoint_to_another_layout(
    pool: WarmPool, undisturbed: Any, tmp_path: Path, layout: str, resumed: str
) -> None:
    pool.train(make_small_config(tmp_path, *BASE, *LAYOUTS[layout]), callbacks=[Counters()], steps_to=3)
    config = make_small_config(tmp_path, *BASE, *LAYOUTS[resumed])
    records = pool.train(config, callbacks=[Counters()], resume_step=3)
    assert [get_final_state(rank) for rank in records] == [undisturbed[0]] * len(records)
    sums = read_sums(tmp_path, 6)
    assert sums.keys() == undisturbed[1].keys() and len(sums) > 10
    assert all(torch.equal(tensor, undisturbed[1][name]) for name, tensor in sums.items())


@pytest.mark.parametrize("layout", ["tp-2", "pp-2"])
def test_state_of_a_cut_model_has_the_shapes_and_values_of_the_whole(
    pool: WarmPool, tmp_path: Path, layout: str
) -> None:
    for name in ("one", layout):
        config = make_small_config(tmp_path / name, *BASE, *LAYOUTS[name], "train.dtype=fp64")
        pool.train(config, callbacks=[Counters()])
    expected, sums = read_sums(tmp_path / "one", 6), read_sums(tmp_path / layout, 6)
    assert sums.keys() == expected.keys() and len(sums) > 10
    assert all(torch.allclose(tensor, expected[name], rtol=0, atol=1e-9) for name, tensor in sums.items())


@pytest.mark.parametrize("layout", ["ddp-3", "zero1-2", "zero3-3"])
def test_state_is_recovered_from_memory_by_other_ranks_and_a_joining_one(
    pool: WarmPool, undisturbed: Any, layout: str
) -> None:
    """In the first generation the layout has 2 or 3 ranks; in the second there is one more, which has no state."""
    config = make_small_config(None, *BASE, *LAYOUTS[layout])
    world_size = int(config.cluster.workers)
    first = replace(make_worker_spec(config, world_size, steps_to=3), callbacks=(Counters(),))
    pool.call(run_generation, world_size, [first], range(world_size), range(world_size))
    grown = make_small_config(None, *BASE, *LAYOUTS[layout], f"cluster.workers={world_size + 1}")
    second = replace(
        make_worker_spec(grown, world_size + 1, steps_to=6), callbacks=(Counters(),), memory_step=3, generation=2
    )
    ranks = [*range(1, world_size), 0, world_size]
    results = pool.call(run_generation, world_size + 1, [second], ranks, [world_size])
    for *_, records in results:
        assert get_final_state(records) == undisturbed[0]
        assert any(line.startswith("state: 3 [{'loss'") for line in get_notes(records))


def test_callbacks_can_be_added_and_removed_when_a_run_resumes(pool: WarmPool, tmp_path: Path) -> None:
    words = [*BASE, *LAYOUTS["zero3-3"], "checkpoint.interval=2"]
    pool.train(make_small_config(tmp_path, *words), steps_to=2)
    added = pool.train(make_small_config(tmp_path, *words), callbacks=[Counters()], resume_step=2, steps_to=4)
    assert get_notes(added[2])[0] == "state: 0 [] [0, 0, 0]" and get_final_state(added[2]).startswith("end: 2 ")
    removed = pool.train(make_small_config(tmp_path, *words), resume_step=4)
    assert [step["step"] for step in get_step_metrics(removed[0])] == [5, 6]


def test_an_optional_callback_that_fails_on_one_rank_keeps_its_state_on_all(pool: WarmPool, tmp_path: Path) -> None:
    config = make_small_config(tmp_path, *BASE, "cluster.workers=2", "fault.replica_check_interval=1")
    records = pool.train(config, callbacks=[FailingCounter(3)])
    assert [step["step"] for step in get_step_metrics(records[0])] == [1, 2, 3, 4, 5, 6]
    checkpoint = CheckpointStore(tmp_path / "checkpoints").find(6)
    assert checkpoint is not None
    names = [name for name in checkpoint.index if name.startswith("callbacks.FailingCounter.")]
    assert len(names) > 10
    for name in names:
        tensor = torch.empty(checkpoint.index[name].shape)
        read_state(checkpoint, ShardedState([StateShard.from_tensor(name, tensor)]))
        assert (tensor == 2).all(), name


def test_rollback_restores_the_state_of_callbacks(pool: WarmPool, tmp_path: Path) -> None:
    words = [*BASE, "train.steps=8", "fault.on_nan=rollback", "cluster.workers=2", "checkpoint.interval=0"]
    pool.train(make_small_config(tmp_path, *words), callbacks=[Counters()], steps_to=3)
    config = make_small_config(tmp_path, *words, "fault.inject=[{kind: nan, step: 6},{kind: nan, step: 6}]")
    for records in pool.train(config, callbacks=[Counters()], resume_step=3):
        # Step 6 counts as committed, on the state after step 3: its own `post_step` and those of steps 7 and 8 follow.
        assert get_final_state(records).startswith("end: 6 ")


def test_state_that_differs_between_ranks_is_named(pool: WarmPool, tmp_path: Path) -> None:
    config = make_small_config(tmp_path, *BASE, "cluster.workers=2")
    with pytest.raises(RankFailedError, match=r"CallbackError: callbacks: state_dict returns other values on ranks 1 "):
        pool.train(config, callbacks=[FixedState({"x": 1}, by_rank=True)])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"x": {1, 2}}, "callback state FixedState.x: set is not supported"),
        ({"x": {1: 2}}, "callback state FixedState.x: dict is not supported"),
        ({"x": "y" * 70_000}, "callback FixedState: 70009 bytes of values in state_dict; the limit"),
        ({"x": [torch.zeros(1)]}, "callback state FixedState.x: Tensor is not supported"),
    ],
)
def test_unusable_state_is_refused(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    config = make_small_config(tmp_path, *BASE, "cluster.workers=0")
    with pytest.raises(CallbackError) as caught:
        train(config, callbacks=[FixedState(state)], quiet=True)
    assert str(caught.value).startswith(message)


def test_an_evaluation_whose_effect_was_lost_is_shown_again_and_not_repeated(pool: WarmPool, tmp_path: Path) -> None:
    """The checkpoint of step 3 is older than the evaluation of that step, which metrics.jsonl has."""
    words = [*BASE, "eval.interval=3", "cluster.workers=2"]
    first = pool.train(make_small_config(tmp_path, *words), callbacks=[Requester(0, {})], steps_to=3)
    metrics = get_step_metrics(first[0])[-1]
    resume = {"callbacks": [Requester(0, {})], "resume_step": 3, "steps_to": 4}
    again = pool.train(make_small_config(tmp_path, *words), **resume, start_metrics=metrics)
    evaluated = f"evaluated 3: {metrics['val/loss']}"
    assert [line for line in get_notes(again[1]) if line.startswith("evaluated 3")] == [evaluated]
    assert [step["step"] for step in get_step_metrics(again[0])] == [4]
    pending = {key: value for key, value in metrics.items() if key != "val/loss"}
    repeated = pool.train(make_small_config(tmp_path, *words), **resume, start_metrics=pending)
    assert [(step["step"], step.get("val/loss")) for step in get_step_metrics(repeated[0])][0] == (
        3,
        metrics["val/loss"],
    )
