"""A transformers model through a kill: the bits of the run without the fault, and of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from raytrain_hpc import train
from tests.huggingface.test_transformers_training import SIZES
from tests.warm_pool import make_small_config

BASE = ["train.steps=16", "train.micro_batch_size=2", "train.deterministic=elastic", "checkpoint.interval=0"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZES)).save_pretrained(directory)
    return directory


def run(directory: Path, model_dir: Path, *words: str) -> dict[int, tuple[float, float]]:
    """Train and return loss and gradient norm of each step; the last line of a step counts."""
    train(make_small_config(directory, *BASE, f"model.hf={model_dir}", *words), quiet=True)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["train/loss"], line["train/grad_norm"]) for line in lines}


@pytest.fixture(scope="module")
def one_process(ray_cluster: None, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    return run(tmp_path_factory.mktemp("one"), model_dir, "cluster.workers=1")


@pytest.mark.parametrize("words", [["cluster.workers=3"], ["cluster.workers=3", "parallel.zero=3"]])
def test_a_killed_rank_changes_no_bit(one_process: object, model_dir: Path, tmp_path: Path, words: list[str]) -> None:
    steps = run(tmp_path, model_dir, *words, "fault.inject=[{kind: kill, rank: 1, step: 6}]")
    assert steps == one_process
    incidents = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [(incident["kind"], incident["steps_lost"]) for incident in incidents] == [("died", 0)]


def test_a_killed_rank_of_a_tensor_parallel_pair_is_recovered(
    one_process: dict[int, tuple[float, float]], model_dir: Path, tmp_path: Path
) -> None:
    words = ["cluster.workers=4", "parallel.tp=2", "parallel.zero=3", "fault.inject=[{kind: kill, rank: 1, step: 6}]"]
    steps = run(tmp_path, model_dir, *words)
    losses = [loss for loss, _ in steps.values()]
    assert losses == pytest.approx([loss for loss, _ in one_process.values()], rel=1e-5)
