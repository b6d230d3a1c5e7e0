"""The text sampled at the end of training is printed and stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import raytrain_hpc as rt
from raytrain_hpc import Result, load_config
from raytrain_hpc.cli.main import main
from raytrain_hpc.cli.train_summary import sample_text
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import CheckpointError
from tests.warm_pool import make_small_config


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Result]:
    """A finished run whose model always writes the same two lines."""
    monkeypatch.setattr("raytrain_hpc.text_generation.generate", lambda *args, **options: iter(["def ", "f:\n", "  x"]))
    (tmp_path / "tokenizer.json").write_text('{"name": "byte"}')
    times = {"wall_s": 1.0, "goodput": 1.0, "restarts": 0, "startup": {}}
    losses = {"train_loss": 1.0, "val_loss": 1.0, "best_val_loss": 1.0}
    where = {"layout": {}, "checkpoint": str(tmp_path / "checkpoints" / "step-00000007"), "run_dir": str(tmp_path)}
    result = Result(outcome="done", steps=7, tokens=70, **times, **losses, **where)
    return load_config(None, [f"run.dir={tmp_path}"]), result


def test_sample_is_printed_and_stored(run: tuple[Config, Result], tmp_path: Path) -> None:
    assert list(sample_text(*run)) == ["sample of the model's own text:", "  | def f:", "  |   x"]
    assert list(sample_text(*run))[-1] == "  |   x"  # the same command once more
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 7, "prompt": "\n", "answer": "def f:\n  x"}


def test_sample_that_cannot_be_stored_is_reported(run: tuple[Config, Result], tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    assert list(sample_text(*run))[-1] == "alarm: the sample was not stored: Is a directory"


def test_sample_that_fails_is_one_alarm_and_keeps_the_result(
    run: tuple[Config, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> Iterator[str]:
        raise CheckpointError("no valid\ncheckpoint")
        yield

    monkeypatch.setattr("raytrain_hpc.text_generation.generate", fail)
    assert list(sample_text(*run)) == ["alarm: no text was sampled: no valid checkpoint"]
    (tmp_path / "tokenizer.json").write_text('{"name": "other"}')
    (line,) = sample_text(*run)
    assert line.startswith("alarm: no text was sampled: tokenizer 'other' of the dataset is unknown")


def test_sample_of_a_text_without_line_breaks(tmp_path: Path) -> None:
    """A char tokenizer has only the characters of its text, so a line break cannot be the prompt."""
    (tmp_path / "text.txt").write_text("a cab had a bad bag " * 200)
    rt.prepare([str(tmp_path / "text.txt")], tmp_path / "data", tokenizer="char")
    config = make_small_config(tmp_path / "run", "cluster.workers=0", f"data.path={tmp_path / 'data'}", "train.steps=2")
    config.model.vocab_size, config.logging.sample_tokens = "auto", 9
    result = rt.train(config, quiet=True)
    title, line = sample_text(config, result)
    assert title == "sample of the model's own text:" and set(line.removeprefix("  | ")) <= set("abcdgh ")
    assert json.loads((tmp_path / "run" / "samples.jsonl").read_text())["prompt"] == " "
    done = CliRunner().invoke(main, ["generate", str(tmp_path / "run"), "--max-tokens", "9"])
    assert (done.exit_code, len(done.stdout)) == (0, 10)


def test_sample_of_a_model_with_more_tokens_than_the_tokenizer(tmp_path: Path) -> None:
    """Models are padded or imported with larger vocabularies; one that is hardly trained would pick any id."""
    config = make_small_config(
        tmp_path, "cluster.workers=0", "data.path=stdlib", "model.vocab_size=2000", "train.steps=2"
    )
    rt.train(config, quiet=True)
    assert len("".join(rt.generate(tmp_path, max_tokens=50))) > 0
