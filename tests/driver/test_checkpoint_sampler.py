"""Checkpoints are sampled during training; a failure to sample is reported once."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import raytrain_hpc as rt
from raytrain_hpc.driver import checkpoint_sampler
from raytrain_hpc.driver.run_directory import RunDirectory
from tests.warm_pool import make_small_config

ALONE = ["cluster.workers=0", "cluster.device=cpu", "train.steps=4", "checkpoint.interval=2", "checkpoint.keep=0"]


def test_a_checkpoint_is_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(400)))
    rt.prepare([text], tmp_path / "bytes", tokenizer="byte")
    words = [f"data.path={tmp_path / 'bytes'}", "model.vocab_size=256", "logging.sample_tokens=5"]
    words += ["logging.prompts=['def f']", "train.steps=2"]  # a process per prompt and checkpoint
    rt.train(make_small_config(tmp_path / "run", *ALONE, *words))
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    pieces = rt.generate(tmp_path / "run", "def f", max_tokens=5, temperature=0, step=2)
    assert samples == [{"step": 2, "prompt": "def f", "answer": "".join(pieces).rstrip("\n")}]
    assert "sample  step 2: 'def f' -> " in capsys.readouterr().out


def test_of_checkpoints_that_wait_the_newest_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, may_answer = threading.Event(), threading.Event()

    def answer(command: list[str]) -> tuple[str, str]:
        started.set()
        assert may_answer.wait(30)
        prompt, step = (command[command.index(option) + 1] for option in ("--prompt", "--step"))
        return f"{prompt}{step}!\n", ""

    monkeypatch.setattr(checkpoint_sampler, "_run_command", answer)
    config, alarms = make_small_config(tmp_path, "logging.prompts=[a,b]"), list[str]()
    sampler = checkpoint_sampler.CheckpointSampler(config, RunDirectory(tmp_path), lambda line: None, alarms.append)
    sampler.on_published(2)
    assert started.wait(30)
    sampler.on_published(4)
    sampler.on_published(6)
    may_answer.set()
    sampler.close()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    answers = [(sample["step"], sample["prompt"], sample["answer"]) for sample in samples]
    assert answers == [(2, "a", "2!"), (2, "b", "2!"), (6, "a", "6!"), (6, "b", "6!")] and not alarms


def test_sampling_continues_after_an_error_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_sampler, "_run_command", lambda command: (f"{command[-1]}!", ""))
    config, alarms = make_small_config(tmp_path, "logging.prompts=[a]"), list[str]()
    sampler = checkpoint_sampler.CheckpointSampler(config, RunDirectory(tmp_path), lambda line: None, alarms.append)
    (tmp_path / "samples.jsonl").mkdir()  # in the way of the file
    for step in (2, 4):
        sampler.on_published(step)
        sampler.close()
    assert alarms == [f"logging.prompts: {tmp_path}/samples.jsonl: Is a directory; training continues"]
    (tmp_path / "samples.jsonl").rmdir()
    sampler.on_published(6)
    sampler.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text())["step"] == 6


def test_failure_to_sample_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rt.train(make_small_config(tmp_path / "run", *ALONE, "logging.prompts=['?']"))  # synthetic data has no tokenizer
    printed = capsys.readouterr().out
    assert printed.count("alarm: logging.prompts: ") == 1 and "the run has no tokenizer" in printed
    assert (tmp_path / "run" / "result.json").exists()
