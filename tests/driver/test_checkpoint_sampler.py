"""Checkpoints are asked while the run goes on; what cannot be answered is one alarm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raytrain_hpc as rt
from tests.warm_pool import make_small_config

ALONE = ["cluster.workers=0", "cluster.device=cpu", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=0"]


def test_every_checkpoint_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.path=stdlib", "model.vocab_size=256", "observe.sample_tokens=5", "observe.prompts=['def f', 'x = ']"]
    rt.train(make_small_config(tmp_path / "run", *ALONE, *words))
    found = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    asked = [(one["step"], one["prompt"]) for one in found]
    assert asked[:2] == [(2, "def f"), (2, "x = ")]  # the last one only where the first was answered by then
    for one in found:
        pieces = rt.generate(tmp_path / "run", one["prompt"], max_tokens=5, temperature=0, step=one["step"])
        assert one["answer"] == "".join(pieces).rstrip("\n")
    assert "sample  step 2: 'def f' -> " in capsys.readouterr().out


def test_what_cannot_be_asked_is_one_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rt.train(make_small_config(tmp_path / "run", *ALONE, "observe.prompts=['?']"))  # synthetic tokens mean nothing
    printed = capsys.readouterr().out
    assert printed.count("alarm: observe.prompts: ") == 1 and "the run has no tokenizer" in printed
    assert (tmp_path / "run" / "result.json").exists()
