"""Checkpoints are sampled during training; a failure to sample is reported once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raytrain_hpc as rt
from tests.warm_pool import make_small_config

ALONE = ["cluster.workers=0", "cluster.device=cpu", "train.steps=4", "checkpoint.interval=2", "checkpoint.keep=0"]


def test_every_checkpoint_is_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(400)))
    rt.prepare([text], tmp_path / "bytes", tokenizer="byte")
    words = [f"data.path={tmp_path / 'bytes'}", "model.vocab_size=256", "logging.sample_tokens=5"]
    words += ["logging.prompts=['def f', 'x = ']"]
    rt.train(make_small_config(tmp_path / "run", *ALONE, *words))
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    prompts = [(sample["step"], sample["prompt"]) for sample in samples]
    assert prompts[:2] == [(2, "def f"), (2, "x = ")]  # the last checkpoint only if the first was sampled in time
    for sample in samples:
        pieces = rt.generate(tmp_path / "run", sample["prompt"], max_tokens=5, temperature=0, step=sample["step"])
        assert sample["answer"] == "".join(pieces).rstrip("\n")
    assert "sample  step 2: 'def f' -> " in capsys.readouterr().out


def test_failure_to_sample_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rt.train(make_small_config(tmp_path / "run", *ALONE, "logging.prompts=['?']"))  # synthetic data has no tokenizer
    printed = capsys.readouterr().out
    assert printed.count("alarm: logging.prompts: ") == 1 and "the run has no tokenizer" in printed
    assert (tmp_path / "run" / "result.json").exists()
