"""Sweep: every combination once, validated before anything runs, and one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_hpc.cli.main import main
from raytrain_hpc.cli.sweep import Trial, build_trials, format_table
from raytrain_hpc.errors import ConfigError
from tests.warm_pool import SMALL_OVERRIDES


def test_every_combination_is_one_trial(tmp_path: Path) -> None:
    over = [
        "optimizer.lr=1e-3,3e-3",
        "train.micro_batch_size=auto,4",
        "fault.inject=[],[{kind: kill, rank: 0, step: 1}]",
    ]
    trials = build_trials(None, [f"run.dir={tmp_path}", *SMALL_OVERRIDES], over)
    assert len(trials) == 8 and len({trial.run_dir for trial in trials}) == 8
    assert trials[1].overrides == (
        "optimizer.lr=1e-3",
        "train.micro_batch_size=auto",
        "fault.inject=[{kind: kill, rank: 0, step: 1}]",
    )
    assert all(trial.run_dir.parent == tmp_path for trial in trials)


@pytest.mark.parametrize(
    "over, reason",
    [
        ([], "name a key to vary"),
        (["optimizer.lr"], "must have the form key=value,value,..."),
        (["optimizer.lr=1e-3,,1e-2"], "must have the form key=value,value,..."),
        (["optimizer.lr=1e-3,-1"], "needs more than 0"),
        (["train.rate=1"], "did you mean"),
    ],
)
def test_invalid_combination_is_rejected_before_anything_runs(tmp_path: Path, over: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_trials(None, [f"run.dir={tmp_path / 'base'}"], over)
    assert not (tmp_path / "base").exists()


def test_parallel_runs_of_which_one_fails(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path}", *SMALL_OVERRIDES, "train.steps=2", "cluster.workers=0", "cluster.device=cpu"]
    # A missing dataset is only detected by the run itself.
    over = ["--over", f"data.path=synthetic,{tmp_path / 'nowhere'}", "--at-once", "2"]
    done = CliRunner().invoke(main, ["sweep", *words, *over, "--json"])
    assert done.exit_code == 4, done.output
    good, bad = json.loads(done.stdout)
    assert good["exit_code"] == 0 and good["validation"] > 0 and good["seconds"] > 0
    assert bad["exit_code"] == 2 and bad["loss"] is None
    assert "nowhere" in (Path(bad["run_dir"]) / "output.log").read_text()
    again = CliRunner().invoke(main, ["sweep", *words, "--over", "data.path=synthetic"])
    assert again.exit_code == 0 and "done: 2 steps" in (Path(good["run_dir"]) / "output.log").read_text()
    shown = again.stdout.splitlines()
    assert shown[0].split() == ["run", "loss", "validation", "tokens/s", "mfu", "GiB", "seconds"]
    assert shown[1].startswith("data.path=synthetic  ")


def test_table_lists_the_best_first_and_failures_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [Trial((f"run={name}",), tmp_path / name, code) for name, code in (("a", 0), ("b", 0), ("c", 4), ("d", 0))]
    losses = {"a": (1.0, 3.0), "b": (9.0, 2.0), "c": (0.1, 0.1), "d": (2.5, None)}
    empty = dict.fromkeys(("loss", "validation", "tokens/s", "mfu", "GiB", "seconds"))
    monkeypatch.setattr(
        Trial,
        "read_metrics",
        lambda self: empty | dict(zip(("loss", "validation"), losses[self.run_dir.name], strict=True)),
    )
    assert [line.split()[0] for line in format_table(trials)[1:]] == ["run=b", "run=d", "run=a", "run=c"]
