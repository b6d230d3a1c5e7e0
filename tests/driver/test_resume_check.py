"""A run that is started again: other settings are refused, and a start that trains nothing changes no file."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from raytrain_hpc import train
from raytrain_hpc.driver import supervisor
from raytrain_hpc.driver.result import Result
from raytrain_hpc.errors import ConfigError, DataError, RunDirectoryError
from tests.data.dataset_writer import write_dataset
from tests.warm_pool import make_small_config

WORDS = ("cluster.workers=0", "cluster.device=cpu", "train.steps=4", "optimizer.lr=0.01")


def start(run_dir: Path, *words: str) -> Result:
    return train(make_small_config(run_dir, *WORDS, *words), quiet=True)


def read_files(run_dir: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and modification time of every file."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in run_dir.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    start(run_dir)
    return run_dir


@pytest.fixture
def run_dir(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, which a test may change."""
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("optimizer.lr=0.02", ("optimizer.lr=0.02 (load_config)", "trained with 0.01", "run.init_from=")),
        ("lr_scheduler.min_lr=0.005", ("lr_scheduler.min_lr=0.005", "trained with 0.001")),
        ("optimizer.name=sgd", ("optimizer.name='sgd'", "'adamw'")),
        ("train.dtype=bf16", ("train.dtype='bf16'", "'fp32'")),
        ("train.global_batch_size=24", ("train.global_batch_size=24", "trained with 12")),
        ("train.seq_len=8", ("train.seq_len=8", "trained with 16")),
        ("run.seed=3", ("run.seed=3", "1337")),
        ("model.num_layers=3", ("model.num_layers=3 (load_config)", "trained with 2")),
        ("model.dropout=0.5", ("model.dropout=0.5", "trained with 0.0")),
        ("train.steps=3", ("train.steps=3 (load_config)", "at step 4")),
        ("run.resume=never", ("run.resume=never", "already holds a run")),
    ],
)
def test_other_settings_are_refused_and_change_no_file(finished_run: Path, word: str, parts: tuple[str, ...]) -> None:
    before = read_files(finished_run)
    with pytest.raises((ConfigError, RunDirectoryError)) as error:
        start(finished_run, word)
    for part in (*parts, str(finished_run), "choose another run.dir"):
        assert part in str(error.value)
    assert "\n" not in str(error.value) and read_files(finished_run) == before


def test_an_unfinished_run_is_held_to_its_settings_too(run_dir: Path) -> None:
    """The settings were stored when it started, and its checkpoint is of an earlier step than train.steps."""
    before = read_files(run_dir)
    with pytest.raises(ConfigError, match="optimizer.lr=0.02"):
        start(run_dir, "optimizer.lr=0.02", "train.steps=9")
    assert read_files(run_dir) == before


def test_a_finished_run_started_again_returns_its_result_and_changes_no_file(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_no_backend(config: Any, *arguments: Any) -> None:
        raise AssertionError("nothing is started for a finished run")

    monkeypatch.setattr(supervisor, "open_backend", open_no_backend)
    before, stored = read_files(finished_run), json.loads((finished_run / "result.json").read_text())
    for words in ((), ("logging.interval=1", "checkpoint.keep=9", "parallel.zero=1")):
        result = start(finished_run, *words)
        assert (result.outcome, result.to_json()) == ("done", stored)
    assert read_files(finished_run) == before


def test_a_missing_result_is_restored_from_the_other_files(run_dir: Path) -> None:
    stored = json.loads((run_dir / "result.json").read_text())
    (run_dir / "result.json").unlink()  # as if the driver had been killed before it wrote the file
    before = read_files(run_dir)
    result = start(run_dir)
    restored = json.loads((run_dir / "result.json").read_text())
    same = ("outcome", "train/loss", "val/loss", "best_val_loss", "steps", "tokens", "layout")
    assert {key: restored[key] for key in same} == {key: stored[key] for key in same}
    assert result.wall_s > 0 and 0 < result.goodput <= 1 and asdict(result)["run_dir"] == str(run_dir)
    changed = {path for path, content in read_files(run_dir).items() if before.get(path) != content}
    assert {Path(path).name for path in changed} <= {"result.json", "lease.json", ".lease.json.lock"}


def test_a_result_that_cannot_be_read_is_kept(run_dir: Path) -> None:
    (run_dir / "result.json").write_text('{"steps": 4')
    before = read_files(run_dir)
    assert start(run_dir).steps == 4
    assert read_files(run_dir) == before


def test_more_steps_continue_the_run(run_dir: Path) -> None:
    result = start(run_dir, "train.steps=6", "logging.interval=3")
    assert (result.outcome, result.steps) == ("done", 6)
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (config["train"]["steps"], config["logging"]["interval"]) == (6, 3)
    assert json.loads((run_dir / "result.json").read_text())["steps"] == 6


def test_the_result_of_an_earlier_start_is_removed_when_training_goes_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is killed between the last checkpoint and result.json, as is another one that left the old file."""
    earlier = (run_dir / "result.json").read_bytes()

    def build_no_result(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "build_result", build_no_result)
    with pytest.raises(KeyboardInterrupt):
        start(run_dir, "train.steps=6")
    assert not (run_dir / "result.json").exists()
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    (run_dir / "result.json").write_bytes(earlier)
    result = start(run_dir, "train.steps=6")
    assert (result.steps, result.train_loss) == (last["step"], last["train/loss"]) == (6, last["train/loss"])
    assert Result.from_json(json.loads((run_dir / "result.json").read_text())).steps == 6


def fail_in_generation(*_: Any) -> str:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("words", "kept"), [(("train.steps=6", "logging.interval=3"), True), ((), False)])
def test_a_start_that_fails_before_its_first_step_replaces_no_settings(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], kept: bool
) -> None:
    """A new run records them at once."""
    directory = run_dir if kept else tmp_path / "new"
    before = read_files(run_dir)
    monkeypatch.setattr(supervisor.Supervisor, "_run_generations", fail_in_generation)
    with pytest.raises(KeyboardInterrupt):
        start(directory, *words)
    names = ("config.yaml", "plan.json", "result.json")
    if kept:
        after = read_files(run_dir)
        assert all(after[str(run_dir / name)] == before[str(run_dir / name)] for name in names)
    else:
        assert (directory / "config.yaml").exists() and (directory / "plan.json").exists()


def test_data_may_move_but_not_change(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("moved", 0), ("other", 1)):
        tokens = np.random.default_rng(seed).integers(0, 64, 2000)
        write_dataset(tmp_path / name, {"train": [tokens]}, vocab_size=64)
    start(tmp_path / "run", f"data.path={tmp_path / 'a'}")
    assert start(tmp_path / "run", f"data.path={tmp_path / 'moved'}").outcome == "done"
    with pytest.raises(ConfigError, match=rf"data.path='{tmp_path / 'other'}'.*trained with other data"):
        start(tmp_path / "run", f"data.path={tmp_path / 'other'}")


def test_a_run_continues_without_a_batch_that_has_no_target(tmp_path: Path) -> None:
    sizes = [16] * 8 + [8] * 4 + [16] * 8  # the third batch of four consists of prompts
    documents = [np.arange(size) + number for number, size in enumerate(sizes)]
    write_dataset(tmp_path / "data", {"train": documents, "val": documents[:4]}, vocab_size=64, prompt=10)
    words = (f"data.path={tmp_path / 'data'}", "data.packing=padded", "data.order=sequential", "model.vocab_size=auto")
    words = (*words, "train.global_batch_size=4", "checkpoint.interval=1")
    with pytest.raises(DataError, match=r"set fault\.on_nan=skip to continue this run without such batches"):
        start(tmp_path / "run", *words)
    result = start(tmp_path / "run", *words, "fault.on_nan=skip")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["train/loss"] for line in lines}
    assert result.steps == 4 and [math.isnan(losses[step]) for step in (1, 2, 3, 4)] == [False, False, True, False]
    (incident,) = (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()
    assert "no token counts in the loss" in incident


def test_validation_without_targets_is_refused_at_the_start(tmp_path: Path) -> None:
    documents = [np.arange(16) + number for number in range(8)]
    prompts = [np.arange(12) + number for number in range(4)]  # longer than train.seq_len
    write_dataset(tmp_path / "data", {"train": documents, "val": prompts}, vocab_size=64, prompt=10)
    words = (f"data.path={tmp_path / 'data'}", "data.packing=padded", "model.vocab_size=auto", "train.seq_len=9")
    with pytest.raises(DataError, match=r"^no token of the validation set counts in the loss.*eval\.samples"):
        start(tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()
