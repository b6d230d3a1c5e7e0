"""Sweep: real runs, one table, JSON, one report; options that do not fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_hpc.cli.main import main
from raytrain_hpc.sweeps.sweep_table import describe_trial, format_table, sort_trials
from raytrain_hpc.sweeps.trial import COLUMNS, State, Trial, summarize_points
from tests.warm_pool import SMALL_OVERRIDES

IN_PROCESS = [*SMALL_OVERRIDES, "cluster.workers=0", "cluster.device=cpu"]


def test_parallel_runs_of_which_one_fails(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path}", *IN_PROCESS, "train.steps=2"]
    # A missing dataset is only detected by the run itself.
    over = ["--over", f"data.path=synthetic,{tmp_path / 'nowhere'}", "--at-once", "2"]
    done = CliRunner().invoke(main, ["sweep", *words, *over, "--json"])
    assert done.exit_code == 4, done.output
    good, bad = json.loads(done.stdout)
    assert good["exit_code"] == 0 and good["validation"] > 0 and good["seconds"] > 0
    assert good["value"] == good["validation"] and good["state"] == "done"
    assert bad["exit_code"] == 2 and bad["state"] == "failed" and bad["loss"] is None
    assert "nowhere" in (Path(bad["run_dir"]) / "output.log").read_text()
    again = CliRunner().invoke(main, ["sweep", *words, "--over", "data.path=synthetic"])
    assert again.exit_code == 0 and (Path(good["run_dir"]) / "output.log").read_text().count("done: 2 steps") == 1
    shown = again.stdout.splitlines()
    assert shown[0].split() == ["run", *COLUMNS]
    assert shown[1].startswith("data.path=synthetic  ")
    assert shown[2:] == [f"report: {tmp_path}/report.html", f"next: raytrain-hpc generate {good['run_dir']}"]


def test_a_search_over_real_runs_is_compared_in_a_report(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path}", *IN_PROCESS, "train.steps=3"]
    over = ["--over", "optimizer.lr=1e-4..1e-1", "--over", "model.num_layers=1..2"]
    arguments = ["sweep", *words, *over, "--search", "tpe", "--trials", "3", "--metric", "train/loss", "--at-once", "1"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    trials = json.loads((tmp_path / "sweep.json").read_text())["trials"]
    losses = [
        json.loads(line)["train/loss"] for line in (tmp_path / "trial-000/metrics.jsonl").read_text().splitlines()
    ]
    assert trials[0]["value"] == losses[-1] and trials[0]["step"] == 3
    best = min(trials, key=lambda trial: trial["value"])
    table = done.stdout.splitlines()
    assert table[1].split()[1] == best["settings"][1]
    assert table[-1] == f"next: raytrain-hpc generate {best['run_dir']}"
    page = (tmp_path / "report.html").read_text()
    for trial in trials:
        assert Path(trial["run_dir"]).name in page
    assert "optimizer.lr" in page and "model.num_layers" in page


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--over", "optimizer.lr=1..2"], "add --search random or --search tpe"),
        (["--over", "optimizer.lr=1,2", "--trials", "3"], "--trials=3 (sweep): a grid trains all combinations"),
        (["--over", "optimizer.lr=1,2", "--min-steps", "3"], "--min-steps=3 (sweep): has no effect without"),
        (["--over", "optimizer.lr=1,-2"], "needs more than 0"),
        (["--over", "optimizer.lr=1,2", "--at-once", "0"], "'--at-once'"),
        (["--over", "optimizer.lr=1,2", "--at-once", "many"], "'--at-once'"),
    ],
)
def test_wrong_options_exit_with_code_2(tmp_path: Path, options: list[str], reason: str) -> None:
    done = CliRunner().invoke(main, ["sweep", f"run.dir={tmp_path / 'new'}", *options])
    assert done.exit_code == 2 and reason in done.stderr and not (tmp_path / "new").exists()


def make_trials(tmp_path: Path, **ends: tuple[State, float | None]) -> list[Trial]:
    return [
        Trial(number, (f"run={name}",), tmp_path / name, state, 0 if state == "done" else 4, value, 7)
        for number, (name, (state, value)) in enumerate(ends.items())
    ]


def test_the_table_lists_the_best_first_and_failures_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: dict[str, tuple[State, float | None]] = {
        "a": ("failed", None),
        "b": ("done", 3.0),
        "c": ("stopped early", 1.0),
        "d": ("done", 2.0),
        "e": ("done", None),
        "f": ("interrupted", 0.5),
    }
    trials = make_trials(tmp_path, **ends)
    assert "".join(trial.run_dir.name for trial in sort_trials(trials)) == "dbecfa"
    assert "".join(trial.run_dir.name for trial in sort_trials(trials, "throughput/mfu", "max")) == "bdecfa"
    # Without a validation split, trials are ordered by their training loss.
    losses = {"x": 2.0, "y": 1.0}
    monkeypatch.setattr(
        Trial, "read_columns", lambda self: dict.fromkeys(COLUMNS) | {"loss": losses.get(self.run_dir.name)}
    )
    without_validation = make_trials(tmp_path, x=("done", None), y=("done", None))
    assert [trial.run_dir.name for trial in sort_trials(without_validation)] == ["y", "x"]
    lines = format_table(sort_trials(trials), "throughput/mfu")
    assert lines[0].split() == ["run", "throughput/mfu", *COLUMNS]
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "run=d",
        "run=b",
        "run=e",
        "run=c (stopped early at step 7)",
        "run=f (interrupted)",
        "run=a (exit code 4)",
    ]


def test_numbers_of_a_search_are_rounded_in_the_table(tmp_path: Path) -> None:
    trial = Trial(
        0, ("optimizer.lr=0.0012345678", "train.steps=123456789", "data.path=1e-3_and_more"), tmp_path, "done"
    )
    assert describe_trial(trial) == "optimizer.lr=0.001235 train.steps=123456789 data.path=1e-3_and_more"


def test_the_value_of_a_run_is_its_last_validation_or_a_median_over_its_last_steps() -> None:
    points = {step: float(step) for step in range(1, 51)}
    assert summarize_points("val/loss", points) == 50.0
    assert summarize_points("train/loss", points | {49: 1e9}) == 48.0  # of steps 46 to 50
    assert summarize_points("train/loss", {1: 2.0, 2: float("nan")}) == 2.0
    assert summarize_points("train/loss", {}) is None
