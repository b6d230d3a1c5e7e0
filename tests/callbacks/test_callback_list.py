"""Hooks of callbacks: their order, requests, which act on all ranks, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc import Callback, KeepBest, train
from raytrain_hpc.callbacks.callback import TrainingContext
from raytrain_hpc.distributed.process_groups import GenerationAbortedError, ParallelContext
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.training.callback_list import CallbackList
from tests.callbacks.recording_callbacks import Failing, HookRecorder, Requester, get_notes
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config

BASE = ["train.steps=4", "train.micro_batch_size=2", "checkpoint.interval=0"]
LAYOUTS = {"ddp-2": ["cluster.workers=2"], "zero3-2": ["cluster.workers=2", "parallel.zero=3"]}
STEP_HOOKS = ["pre_step {0}", "post_forward_backward {0}", "pre_optim_step {0}", "post_step {1}", "post_commit {1}"]


def list_step_hooks(step: int) -> list[str]:
    """Return the hooks of the step after `step` committed ones."""
    return [hook.format(step, step + 1) for hook in STEP_HOOKS]


@pytest.mark.parametrize("layout", [*LAYOUTS, "pp"])
def test_every_hook_is_called_on_every_rank_in_order(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    words = [*BASE, *LAYOUTS.get(layout, ["cluster.workers=2", "parallel.pp=2"])]
    config = make_small_config(tmp_path, *words, "train.steps=2", "eval.interval=1")
    expected = ["on_generation_start 0", "pre_train 0", *list_step_hooks(0), "pre_eval 1", "post_eval 1"]
    expected += [*list_step_hooks(1), "pre_checkpoint_saved 2", "post_checkpoint_saved 2"]
    expected += ["pre_eval 2", "post_eval 2", "close 2"]
    for records in pool.train(config, callbacks=[HookRecorder()]):
        assert [line.removeprefix("hooks: ") for line in get_notes(records)] == expected


def test_callbacks_are_called_by_priority_and_then_in_the_given_order(pool: WarmPool, tmp_path: Path) -> None:
    callbacks = [HookRecorder("a"), HookRecorder("b", 5), HookRecorder("c"), HookRecorder("d", -5)]
    (records,) = pool.train(make_small_config(tmp_path, *BASE, "train.steps=2"), callbacks=callbacks)
    assert [line[0] for line in get_notes(records) if "post_step 1" in line] == ["b", "a", "c", "d"]


def test_a_recomputed_step_calls_the_hooks_of_its_passes_again(pool: WarmPool, tmp_path: Path) -> None:
    config = make_small_config(tmp_path, *BASE, "train.steps=2", "fault.inject=[{kind: nan, step: 2}]")
    (records,) = pool.train(config, callbacks=[HookRecorder()])
    hooks = [line.removeprefix("hooks: ") for line in get_notes(records)]
    assert hooks.count("pre_step 1") == hooks.count("post_forward_backward 1") == 2
    assert hooks.count("pre_optim_step 1") == hooks.count("post_step 2") == 1


def run_requests(pool: WarmPool, tmp_path: Path, layout: str, requests: Any, *words: str) -> Any:
    """Train with requests of rank 1. Return the records of all ranks, and the lines of rank 0."""
    config = make_small_config(tmp_path, *BASE, *LAYOUTS[layout], *words)
    records = pool.train(config, callbacks=[Requester(1, requests)])
    lines = [[line for line in get_notes(rank) if not line.startswith("alarm")] for rank in records]
    assert lines[0] == lines[1], "both ranks did the same"
    return records, lines[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_of_one_rank_act_on_all_after_the_current_step(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    requests = {"post_step": {1: [("evaluate", ())], 2: [("save", ("good",))], 3: [("stop", ())]}}
    records, lines = run_requests(pool, tmp_path, layout, requests, "train.steps=9")
    steps = get_step_metrics(records[0])
    assert [step["step"] for step in steps] == [1, 2, 3]
    losses = {step["step"]: step["val/loss"] for step in steps if "val/loss" in step}
    assert list(losses) == [1, 3], "training that a callback ends is evaluated, as at its last step"
    assert lines == [f"evaluated 1: {losses[1]}", "saved 2", "saved 3", f"evaluated 3: {losses[3]}"]
    assert [r for r in records[0] if r["type"] == "label"] == [{"type": "label", "step": 2, "labels": ["good"]}]


def test_requests_of_an_evaluation_act_on_its_step(pool: WarmPool, tmp_path: Path) -> None:
    requests = {"post_eval": {1: [("save", ("a",))], 2: [("save", ("b",)), ("stop", ())]}}
    records, lines = run_requests(pool, tmp_path, "ddp-2", requests, "train.steps=9", "eval.interval=1")
    assert [line.split(":")[0] for line in lines] == ["evaluated 1", "saved 1", "evaluated 2", "saved 2"]
    assert [(r["step"], r["labels"]) for r in records[0] if r["type"] == "label"] == [(1, ["a"]), (2, ["b"])]


def test_a_step_that_is_saved_anyway_is_saved_once_and_labelled(pool: WarmPool, tmp_path: Path) -> None:
    requests = {"post_step": {2: [("save", ("x",))]}, "post_eval": {2: [("save", ("y",))]}}
    words = ["train.steps=3", "eval.interval=1", "checkpoint.interval=1"]
    records, lines = run_requests(pool, tmp_path, "ddp-2", requests, *words)
    assert [line for line in lines if line.startswith("saved")] == ["saved 1", "saved 2", "saved 3"]
    assert [(r["step"], r["labels"]) for r in records[0] if r["type"] == "label"] == [(2, ["x"]), (2, ["y"])]


def test_a_stop_before_the_first_step_trains_nothing(pool: WarmPool, tmp_path: Path) -> None:
    records, lines = run_requests(pool, tmp_path, "ddp-2", {"pre_train": {0: [("stop", ())]}})
    assert not get_step_metrics(records[0]) and not lines


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_evaluated_before_the_first_step(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    requests = {"pre_train": {0: [("evaluate", ())]}, "post_step": {1: [("evaluate", ())]}}
    words = ["train.steps=2", "optimizer.lr=1e-30"]  # too small to change a weight
    config = make_small_config(tmp_path, *BASE, *LAYOUTS[layout], *words)
    first, second = pool.train(config, callbacks=[Requester(1, requests)])
    losses = {step["step"]: step["val/loss"] for step in get_step_metrics(first) if "val/loss" in step}
    assert set(losses) == {1, 2}, "metrics.jsonl has lines of steps only"
    expected = [f"evaluated 0: {losses[1]}", f"step 0: val/loss {losses[1]:.4f}"]
    expected += [f"evaluated 1: {losses[1]}", "saved 2", f"evaluated 2: {losses[1]}"]
    assert get_notes(first) == expected
    assert get_notes(second) == [line for line in expected if not line.startswith("step 0")]


def test_the_best_weights_can_be_the_initial_ones(tmp_path: Path) -> None:
    class EvaluateFirst(Callback):
        def pre_train(self) -> None:
            self.control.evaluate()

    config = make_small_config(tmp_path, *BASE, "cluster.workers=0", "cluster.device=cpu", "optimizer.lr=10")
    result = train(config, callbacks=[EvaluateFirst(), KeepBest()], quiet=True)
    assert result.outcome == "done" and (tmp_path / "checkpoints/step-00000000").is_dir()
    assert train(config, callbacks=[EvaluateFirst(), KeepBest()], quiet=True).steps == 4  # a complete run stays so


def test_evaluation_without_a_validation_split_is_refused(tmp_path: Path) -> None:
    control = CallbackList([], make_context(), ParallelContext(0, Layout(), None)).control  # type: ignore[arg-type]
    with pytest.raises(CallbackError, match="no validation split"):
        control.evaluate()


def test_an_exception_ends_the_run_and_names_the_callback(tmp_path: Path) -> None:
    config = make_small_config(tmp_path, "cluster.workers=0", *BASE)
    with pytest.raises(CallbackError) as caught:
        train(config, callbacks=[Failing("post_step", 2), HookRecorder()], quiet=True)
    assert str(caught.value) == "callback Failing: post_step failed on rank 0 at step 2: ValueError: no reason"
    assert caught.value.exit_code == 4 and isinstance(caught.value.__cause__, ValueError)


class Writer(Callback):
    """Write entries of the metrics in a hook; delete those with the value None."""

    def __init__(self, hook: str, entries: dict[str, Any]):
        def write(metrics: dict[str, Any]) -> None:
            metrics.update(entries)
            for key in [key for key, value in entries.items() if value is None]:
                del metrics[key]

        setattr(self, hook, write)

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Do nothing unless replaced."""

    def post_eval(self, metrics: dict[str, Any]) -> None:
        """Do nothing unless replaced."""


class Other(Writer):
    """Another name in messages."""


@pytest.mark.parametrize(
    "hook, entries, problem",
    [
        ("post_step", {"user/x": "text"}, "metrics['user/x'] is str; add numbers only"),
        ("post_step", {"train/loss": 0.0}, "metrics['train/loss'] is written by the run; choose another key"),
        ("post_step", {"train/lr": None}, "metrics['train/lr'] is written by the run"),
        ("post_step", {"throughput/mfu": 0.5}, "metrics['throughput/mfu'] is written by the run"),
        ("post_step", {"val/clean/loss": 1.0}, "metrics['val/clean/loss'] is written by the run"),
        ("post_eval", {"val/loss": 1.0}, "metrics['val/loss'] is written by the run"),
    ],
)
def test_metrics_of_the_run_are_not_overwritten(hook: Any, entries: dict[str, Any], problem: str) -> None:
    first = Writer(hook, {"user/a": 1, "val/accuracy": 0.5})
    callbacks = [first, Other(hook, entries), Writer(hook, {})]
    context = ParallelContext(0, Layout(), None)  # type: ignore[arg-type]
    metrics = {"step": 1, "train/loss": 2.0, "train/lr": 0.1, "val/loss": 3.0}
    listed = CallbackList(callbacks, make_context(), context, eval_metrics=["val/loss", "val/clean/loss"])
    with pytest.raises(CallbackError) as caught:
        listed.run(hook, metrics)
    assert str(caught.value).startswith(f"callback Other: {problem}")


def test_entries_of_callbacks_are_added_and_changed_by_later_ones() -> None:
    metrics = {"step": 1, "train/loss": 2.0}
    callbacks = [Writer("post_step", {"user/a": 1, "val/loss": 4.0}), Other("post_step", {"user/a": 2})]
    context = ParallelContext(0, Layout(), None)  # type: ignore[arg-type]
    CallbackList(callbacks, make_context(), context).run("post_step", metrics)
    assert metrics == {"step": 1, "train/loss": 2.0, "user/a": 2, "val/loss": 4.0}


def test_an_optional_callback_is_dropped_with_an_alarm(pool: WarmPool, tmp_path: Path) -> None:
    config = make_small_config(tmp_path, *BASE, "cluster.workers=2")
    records = pool.train(config, callbacks=[Failing("pre_step", 1, rank=1, optional=True)])
    assert len(get_step_metrics(records[0])) == 4 and not get_notes(records[0])
    (line,) = get_notes(records[1])
    assert line.startswith(
        "alarm: callback Failing: pre_step failed on rank 1 at step 1: ValueError: no reason; it is opt"
    )


def test_error_hooks_see_the_error_and_cannot_replace_it(pool: WarmPool, tmp_path: Path) -> None:
    config = make_small_config(tmp_path, *BASE, "fault.inject=[{kind: exception, step: 2}]")
    with pytest.raises(RankFailedError, match="ArithmeticError: injected"):
        pool.train(config, callbacks=[Failing("close", 1)])


def make_context() -> TrainingContext:
    lines: list[str] = []
    config = make_small_config()
    return TrainingContext(config, 0, 1, 1, None, 0, 4, lines.append)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [GenerationAbortedError("aborted"), RuntimeError("Connection closed by peer [127.0.0.1]:1234")]
)
def test_a_collective_of_a_callback_that_fails_counts_as_a_failed_peer(error: Exception) -> None:
    class Reducing(Callback):
        def pre_step(self) -> None:
            raise error

    callbacks = CallbackList([Reducing()], make_context(), ParallelContext(0, Layout(), None))  # type: ignore[arg-type]
    with pytest.raises(type(error)) as caught:
        callbacks.run("pre_step")
    assert caught.value is error


def test_objects_that_are_no_callbacks_are_refused(tmp_path: Path) -> None:
    config = make_small_config(tmp_path, "cluster.workers=0")
    with pytest.raises(CallbackError, match="callbacks: HookRecorder is no callback; pass an instance"):
        train(config, callbacks=[HookRecorder], quiet=True)  # type: ignore[list-item]
    with pytest.raises(CallbackError, match="callbacks: int is no callback; derive it"):
        train(config, callbacks=[3], quiet=True)  # type: ignore[list-item]
