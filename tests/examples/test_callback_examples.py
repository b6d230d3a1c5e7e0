"""The examples of callbacks, own datasets and transformers models run as a user would run them, with few steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.driver.cli_process import CliRunner
from tests.examples.test_examples import EXAMPLES, FEW_STEPS

MAX_LINES = 30


RunExample = Callable[..., str]


@pytest.fixture
def run_example(cli: CliRunner, tmp_path: Path) -> RunExample:
    """A function that runs an example in `tmp_path` and returns its output."""

    def run(path: str, *words: str) -> str:
        code, output = cli.run_script(tmp_path / f"{Path(path).stem}.out", EXAMPLES / path, *words)
        assert code == 0, output
        return output

    return run


@pytest.fixture
def run_callback_example(run_example: RunExample) -> RunExample:
    """A function that runs an example of a callback with a tiny model and returns its output."""
    return lambda name, *words: run_example(f"callbacks/{name}.py", *FEW_STEPS, *words)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("path", sorted((EXAMPLES / "callbacks").glob("*.py")), ids=lambda path: path.stem)
def test_examples_of_callbacks_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_every_built_in_callback_has_an_example() -> None:
    from raytrain_hpc.callbacks.plugins import BUILT_IN

    assert set(BUILT_IN) <= {path.stem for path in (EXAMPLES / "callbacks").glob("*.py")}


def test_early_stopping_ends_the_run(run_callback_example: RunExample, tmp_path: Path) -> None:
    output = run_callback_example("early_stopping")
    assert re.search(r"^done after 15 of 200 steps, validation loss \d", output, re.MULTILINE)
    assert "early stopping: val/loss has not improved on " in output


def test_keep_best_keeps_two_checkpoints(run_callback_example: RunExample, tmp_path: Path) -> None:
    """The rate rises until the loss is ten times as large, so that the last evaluation is not the best one."""
    output = run_callback_example("keep_best", "optimizer.lr=10", "lr_scheduler.warmup_steps=30")
    losses = {
        line["step"]: line["val/loss"] for line in read_metrics(tmp_path / "runs/keep_best") if "val/loss" in line
    }
    best = min(losses, key=lambda step: losses[step])
    assert best < 30
    assert f"kept: step-{best:08d} step-00000030\n" in output
    assert f'labels: {{ "best": {best} }}\n' in output


def test_ema_changes_validation_and_samples_but_not_training(run_callback_example: RunExample, tmp_path: Path) -> None:
    output = run_callback_example("ema", "train.steps=20")
    trained, averaged = (read_metrics(tmp_path / f"runs/ema_{name}") for name in ("trained", "averaged"))
    assert [line["train/loss"] for line in trained] == [line["train/loss"] for line in averaged]
    val_losses = [lines[-1]["val/loss"] for lines in (trained, averaged)]
    assert val_losses[0] != val_losses[1]
    expected = f"validation loss {val_losses[0]:.4f} of the weights, {val_losses[1]:.4f} of their average"
    assert expected in output
    assert re.search(r"^averaged: '", output, re.MULTILINE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, files and ranges are recorded")
def test_examples_for_a_gpu_say_that_there_is_none(run_callback_example: RunExample, tmp_path: Path) -> None:
    assert "snapshots: none, because no rank has a GPU" in run_callback_example("memory_snapshot")
    assert "steps 1 to 6 have no ranges" in run_callback_example("nvtx_ranges")


def test_garbage_collection_collects_at_fixed_steps(cli: CliRunner, tmp_path: Path) -> None:
    script, often = EXAMPLES / "callbacks/garbage_collection.py", "import gc; gc.set_threshold(100)"
    code, output = cli.run_script(tmp_path / "out", script, *FEW_STEPS, patch=often)
    assert code == 0, output
    automatic, fixed = map(int, re.findall(r"garbage was collected (\d+) times in 40 steps", output))
    assert fixed == 2 < automatic


def test_state_of_a_callback_survives_a_restart(run_callback_example: RunExample, tmp_path: Path) -> None:
    output = run_callback_example("stateful_callback")
    average = 0.0
    for line in read_metrics(tmp_path / "runs/stateful_callback"):
        average += 0.1 * (line["train/grad_norm"] - average)
        assert line["train/average_norm"] == average
    assert f"step 20: average norm {average:.6f}" in output


def test_driver_callback_reports_and_stops(run_callback_example: RunExample, tmp_path: Path) -> None:
    output = run_callback_example("driver_callback", "train.steps=20000", "optimizer.lr=0.02")
    assert re.search(r"^message: checkpoint of step (\d+) in step-\d+$", output, re.MULTILINE)
    assert output.splitlines()[-1] == "stopped"


def test_image_classifier_learns(run_example: RunExample, tmp_path: Path) -> None:
    output = run_example("image_classifier.py", "eval.samples=40")
    last = read_metrics(tmp_path / "runs/image_classifier")[-1]
    clean, noisy = last["val/clean/loss"], last["val/noisy/loss"]
    assert clean < noisy and last["val/loss"] == pytest.approx((clean + noisy) / 2)
    assert f"done: validation loss {clean:.3f} clean, {noisy:.3f} noisy" in output
    assert len((EXAMPLES / "image_classifier.py").read_text().splitlines()) <= 60


def test_transformers_model_is_trained_exported_and_loaded(run_example: RunExample, tmp_path: Path) -> None:
    words = ["train.steps=20", "logging.tensorboard=false"]
    output = run_example("transformers_model.py", *words)
    assert "runs/transformers_model/exported has LlamaForCausalLM\ndef " in output
    losses = [line["train/loss"] for line in read_metrics(tmp_path / "runs/transformers_model")]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5
    assert (tmp_path / "runs/transformers_model/exported/model.safetensors").exists()
    assert len((EXAMPLES / "transformers_model.py").read_text().splitlines()) <= 50
