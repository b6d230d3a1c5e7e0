"""A sweep with a stand-in for training: limits, failures, bad trials, interruption, and continuing."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import log10
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import ConfigError, MissingDependencyError, RunDirectoryError
from raytrain_hpc.sweeps.sweep_plan import SweepOptions, SweepPlan
from raytrain_hpc.sweeps.sweep_result import SweepResult
from raytrain_hpc.sweeps.sweep_runner import run_sweep
from raytrain_hpc.sweeps.trial import Trial
from raytrain_hpc.sweeps.trial_process import MetricFollower

FAKE_TRAIN = (sys.executable, str(Path(__file__).with_name("fake_train.py")))


def make_plan(directory: Path, *over: str, words: tuple[str, ...] = (), **options: Any) -> SweepPlan:
    overrides = [f"run.dir={directory}", "cluster.workers=0", "cluster.device=cpu", "train.steps=4", *words]
    return SweepPlan(load_config(None, overrides), SweepOptions(over, **options))


def run(plan: SweepPlan, log: Callable[[str], None] = lambda line: None) -> SweepResult:
    return run_sweep(plan, log=log, command=FAKE_TRAIN, poll_s=0.02)


def count_starts(trial: Trial) -> int:
    return len((trial.run_dir / "starts").read_text().splitlines())


def find_most_at_once(result: SweepResult, weigh: Callable[[Trial], int] = lambda trial: 1) -> int:
    """Return the largest sum of the weights of trials that ran at the same time."""
    events = []
    for trial in result.trials:
        begin, end = map(float, (trial.run_dir / "times").read_text().split())
        events += [(begin, weigh(trial)), (end, -weigh(trial))]
    total = largest = 0
    for _, change in sorted(events):
        total += change
        largest = max(largest, total)
    return largest


def test_a_failed_trial_does_not_end_the_sweep(tmp_path: Path) -> None:
    result = run(make_plan(tmp_path, "optimizer.lr=1e-3,0.9,1e-2", at_once=1))
    assert [(trial.state, trial.exit_code) for trial in result.trials] == [("done", 0), ("failed", 4), ("done", 0)]
    assert [trial.value for trial in result.trials] == [0.25, None, 1.25]  # the formula, at step 4
    assert result.is_complete


def test_finished_trials_are_not_run_again_and_failed_ones_are(tmp_path: Path) -> None:
    over = "optimizer.lr=1e-3,0.9"
    first, second = (run(make_plan(tmp_path, over, at_once=1)) for _ in range(2))
    assert [count_starts(trial) for trial in second.trials] == [1, 2]
    assert second.trials == first.trials
    # An extended grid keeps what it has; with other common settings every trial is started again.
    extended = run(make_plan(tmp_path, "optimizer.lr=1e-4,1e-3", at_once=1))
    assert [count_starts(trial) for trial in extended.trials] == [1, 1]
    longer = run(make_plan(tmp_path, "optimizer.lr=1e-4,1e-3", words=("train.steps=8",), at_once=1))
    assert [(count_starts(trial), trial.step) for trial in longer.trials] == [(2, 8), (2, 8)]


def test_a_sweep_that_was_moved_continues_with_another_deadline_and_other_logging(tmp_path: Path) -> None:
    options: dict[str, Any] = {"search": "random", "at_once": 1}
    run(make_plan(tmp_path / "here", "optimizer.lr=1e-5..1e-1", num_trials=2, **options))
    (tmp_path / "here").rename(tmp_path / "there")
    words = ("run.deadline=3h", "logging.interval=7")
    moved = run(make_plan(tmp_path / "there", "optimizer.lr=1e-5..1e-1", words=words, num_trials=3, **options))
    assert [count_starts(trial) for trial in moved.trials] == [1, 1, 1]
    assert {trial.run_dir.parent for trial in moved.trials} == {tmp_path / "there"}


def test_trials_lie_in_the_directory_of_the_sweep_whatever_its_name(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "exp #1, 'new'", "optimizer.lr=1e-3,1e-2")
    trials = [plan.make_trial(number, settings) for number, settings in enumerate(plan.search.combinations)]  # type: ignore[attr-defined]
    assert [plan.build_trial_config(trial).run.dir for trial in trials] == [
        f"{tmp_path}/exp #1, 'new'/optimizer.lr={lr}" for lr in ("1e-3", "1e-2")
    ]


def test_trials_of_a_grid_have_directories_of_their_own(tmp_path: Path) -> None:
    long = [f"[{{pattern: '{'ä' * 150}{end}'}}]" for end in "xy"]
    plan = make_plan(tmp_path, "data.path=a/b,a_b,a_b", f"optimizer.groups={','.join(long)}")
    trials = [plan.make_trial(number, settings) for number, settings in enumerate(plan.search.combinations)]  # type: ignore[attr-defined]
    names = {trial.name for trial in trials}
    assert len(trials) == len(names) == 4 and max(len(name.encode()) for name in names) <= 255
    assert [trial.name for trial in trials] == [plan.make_trial(9, trial.settings).name for trial in trials]
    plan = make_plan(tmp_path, "data.path=a/b,a_b,a/b", at_once=1)
    result = run(plan)
    assert [trial.parameters for trial in result.trials] == [{"data.path": "a/b"}, {"data.path": "a_b"}]
    assert [count_starts(trial) for trial in result.trials] == [1, 1]
    assert result.trials[1].name == "data.path=a_b"


def test_a_trial_of_a_grid_is_continued_in_its_recorded_directory(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "data.path=a/b", at_once=1)
    (settings,) = plan.search.combinations  # type: ignore[attr-defined]
    plan.record.save([Trial(0, settings, tmp_path / "data.path=a_b", "interrupted")])
    assert [trial.name for trial in run(plan).trials] == ["data.path=a_b"]


@pytest.mark.parametrize("search", ["random", "tpe"])
def test_a_search_in_two_parts_has_the_trials_of_one_in_one_go(tmp_path: Path, search: str) -> None:
    options = {"search": search, "seed": 3, "at_once": 1}
    whole = run(make_plan(tmp_path / "whole", "optimizer.lr=1e-5..1e-1", num_trials=14, **options))
    run(make_plan(tmp_path / "parts", "optimizer.lr=1e-5..1e-1", num_trials=11, **options))
    parts = run(make_plan(tmp_path / "parts", "optimizer.lr=1e-5..1e-1", num_trials=14, **options))
    assert [trial.settings for trial in parts.trials] == [trial.settings for trial in whole.trials]
    assert all(count_starts(trial) == 1 for trial in parts.trials)
    lr = float(whole.trials[5].settings[0].partition("=")[2])
    assert whole.trials[5].value == (log10(lr) + 3) ** 2 + 0.25


@pytest.mark.parametrize(
    "changed, key",
    [({"seed": 1}, "--seed=1"), ({"search": "tpe"}, "--search='tpe'"), ({"mode": "max"}, "--mode='max'")],
)
def test_another_search_in_the_same_directory_is_refused(tmp_path: Path, changed: dict[str, Any], key: str) -> None:
    options: dict[str, Any] = {"search": "random", "num_trials": 1}
    run(make_plan(tmp_path, "optimizer.lr=1e-5..1e-1", **options))
    with pytest.raises(ConfigError, match=rf"^{key}.* the sweep in .* set it back, or choose another run.dir"):
        make_plan(tmp_path, "optimizer.lr=1e-5..1e-1", **{**options, **changed})
    with pytest.raises(ConfigError, match="^--over="):
        make_plan(tmp_path, "optimizer.lr=1e-5..1e-2", **options)


def test_at_most_so_many_trials_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STARTS", "2")
    result = run(make_plan(tmp_path, "optimizer.lr=1e-1,1e-2,1e-3,1e-4,1e-5", at_once=2))
    assert find_most_at_once(result) == 2


def test_by_default_as_many_trials_run_as_there_are_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STARTS", "2")
    monkeypatch.setattr("raytrain_hpc.driver.trial_slots.count_usable_cpus", lambda: 4)
    plan = make_plan(tmp_path, "optimizer.lr=1e-2,1e-3", "cluster.cpu_threads=1,3,9")
    result = run(plan)
    assert [trial.state for trial in result.trials] == ["done"] * 6

    def count_threads(trial: Trial) -> int:
        return min(4, plan.build_trial_config(trial).cluster.cpu_threads)  # one of 9 threads runs alone

    assert find_most_at_once(result, count_threads) == 4 and find_most_at_once(result) == 2


def test_bad_trials_are_stopped_with_their_state_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.03")
    lines: list[str] = []
    words = ("train.steps=40",)
    options: dict[str, Any] = {"metric": "train/loss", "stop_bad": True, "min_steps": 5, "at_once": 1}
    over = "optimizer.lr=1e-3,2e-3,5e-4,1e-1,1e-3"
    result = run(make_plan(tmp_path, over.removesuffix(",1e-3"), words=words, **options), lines.append)
    assert [trial.state for trial in result.trials] == ["done"] * 3 + ["stopped early"]
    stopped = result.trials[3]
    assert stopped.exit_code == 3 and stopped.step is not None and 5 <= stopped.step < 40
    assert stopped.value == pytest.approx(4 + 1 / stopped.step)
    assert any("optimizer.lr=1e-1: stopping at step" in line and "of 3 other trials" in line for line in lines)
    again = run(make_plan(tmp_path, "optimizer.lr=1e-1,1e-3", words=words, **options))
    assert [count_starts(trial) for trial in again.trials] == [1, 1]
    assert again.is_complete


def test_bad_trials_are_stopped_among_those_that_run_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    options: dict[str, Any] = {"metric": "train/loss", "stop_bad": True, "min_steps": 10, "at_once": 4}
    result = run(make_plan(tmp_path, "optimizer.lr=1e-3,2e-3,2e-2,1e-1", words=("train.steps=40",), **options))
    states = [trial.state for trial in result.trials]
    assert states[0] == "done" and states[3] == "stopped early"


def test_a_signal_stops_all_trials_and_the_same_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.05")
    over, words = "optimizer.lr=1e-3,1e-2,1e-1", ("train.steps=20",)

    def signal_when_two_trials_train() -> None:
        while len(list(tmp_path.glob("*/metrics.jsonl"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=signal_when_two_trials_train).start()
    lines: list[str] = []
    result = run(make_plan(tmp_path, over, words=words, at_once=2), lines.append)
    assert [(trial.state, trial.exit_code) for trial in result.trials] == [("interrupted", 3)] * 2
    assert lines.count("stopping: 2 running trials save their state and stop") == 1
    assert not result.is_complete
    recorded = json.loads((tmp_path / "sweep.json").read_text())["trials"]
    assert [trial["state"] for trial in recorded] == ["interrupted"] * 2
    monkeypatch.setenv("FAKE_STEP_S", "0")
    result = run(make_plan(tmp_path, over, words=words, at_once=2))
    assert result.is_complete and [trial.state for trial in result.trials] == ["done"] * 3
    starts = [list(map(int, (trial.run_dir / "starts").read_text().split())) for trial in result.trials]
    assert [len(first_steps) for first_steps in starts] == [2, 2, 1] and starts[0][1] > 1  # continued, not repeated


def test_a_second_signal_ends_the_sweep_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "5")  # the end of a step, at which a trial would stop, is far away
    plan = make_plan(tmp_path, "optimizer.lr=1e-3", at_once=1)
    monkeypatch.setattr("raytrain_hpc.sweeps.trial_process._KILL_AFTER_S", 0.2)

    def signal_twice() -> None:
        while not list(tmp_path.glob("*/metrics.jsonl")):
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    threading.Thread(target=signal_twice).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(plan)
    assert time.monotonic() - began < 4
    assert json.loads((tmp_path / "sweep.json").read_text())["trials"][0]["state"] == "running"


def test_a_trial_that_was_running_when_the_sweep_was_killed_is_continued(tmp_path: Path) -> None:
    options: dict[str, Any] = {"search": "random", "num_trials": 3, "at_once": 1}
    plan = make_plan(tmp_path, "optimizer.lr=1e-5..1e-1", **options)
    before = run(plan)
    plan.record.save([replace(before.trials[0], state="running"), *before.trials[1:]])
    after = run(make_plan(tmp_path, "optimizer.lr=1e-5..1e-1", **options))
    assert after.trials == before.trials
    assert [count_starts(trial) for trial in after.trials] == [2, 1, 1]


def test_a_search_that_was_interrupted_tries_all_values_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"search": "random", "num_trials": 4, "at_once": 1}
    over = "optimizer.beta1=0.1,0.2,0.3,0.4"
    for seed in range(40):  # one whose trial 2 would have the settings of trial 0 or 1, were they not known
        plan = make_plan(tmp_path / f"{seed}", over, seed=seed, **options)
        asked = [plan.search.ask(number) for number in range(3)]
        if make_plan(tmp_path / f"{seed}", over, seed=seed, **options).search.ask(2) in asked[:2]:
            break
    interrupted = [replace(plan.make_trial(n, asked[n] or ()), state="interrupted") for n in range(2)]
    plan.directory.mkdir()
    plan.record.save(interrupted)
    result = run(make_plan(tmp_path / f"{seed}", over, seed=seed, **options))
    assert sorted(trial.settings for trial in result.trials) == [(f"optimizer.beta1=0.{n}",) for n in range(1, 5)]
    assert [trial.number for trial in result.trials] == [0, 1, 2, 3]
    assert [count_starts(trial) for trial in result.trials] == [1] * 4 and result.is_complete
    # A record that lacks a trial, as an earlier version may have left it: the numbers of the others stay theirs.
    plan.record.save([trial for trial in result.trials if trial.number != 1])
    result = run(make_plan(tmp_path / f"{seed}", over, seed=seed, **options))
    assert [trial.number for trial in result.trials] == [0, 2, 3, 4]
    assert result.trials[3].settings == interrupted[1].settings


def test_a_trial_that_is_still_saving_for_a_killed_sweep_is_waited_for(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "optimizer.lr=1e-3", at_once=1)
    trial = replace(plan.make_trial(0, ("optimizer.lr=1e-3",)), state="running")
    lease = Lease.acquire(trial.run_dir, owner="its process")
    plan.record.save([trial])
    lines: list[str] = []
    times: list[float] = []

    def release() -> None:
        while not lines:
            time.sleep(0.01)
        time.sleep(0.2)
        times.append(time.time())
        lease.release()

    threading.Thread(target=release).start()
    result = run(plan, lines.append)
    assert "waiting for its process of an earlier sweep to end" in lines[0] and f"pid {os.getpid()}" in lines[0]
    assert float((result.trials[0].run_dir / "times").read_text().split()[0]) > times[0]
    assert result.is_complete


def test_invalid_settings_of_a_search_are_a_failed_trial(tmp_path: Path) -> None:
    lines: list[str] = []
    over = ("model.num_heads=4..7", "optimizer.lr=1e-3,1e-4")  # 5, 6 and 7 do not divide model.hidden_size
    with pytest.raises(ConfigError, match="model.num_heads=7"):
        make_plan(tmp_path, *over, words=("model.hidden_size=64",), search="random")
    plan = make_plan(tmp_path, "model.num_heads=4..8", over[1], words=("model.hidden_size=64",), search="random")
    result = run(plan, lines.append)
    assert len(result.trials) == 10  # all combinations
    valid = [trial.settings[0] for trial in result.trials if trial.state == "done"]
    assert sorted(valid) == ["model.num_heads=4"] * 2 + ["model.num_heads=8"] * 2
    assert sum("must divide model.hidden_size=64" in line for line in lines) == 6


@pytest.mark.parametrize(
    "over, options, reason",
    [
        ("optimizer.lr=-1..1", {"search": "tpe"}, "optimizer.lr=-1.0 .*needs more than 0"),
        ("optimizer.lr=1e-3,x", {"search": "tpe"}, "needs a number"),
        ("optimizer.lr=1e-3..1", {}, "add --search random or --search tpe"),
        ("optimizer.lr=1e-3,1", {"metric": "val/los"}, "--metric='val/los'.*did you mean val/loss"),
        ("optimizer.lr=1e-3,1", {"stop_bad": True}, "set eval.interval or --metric train/loss"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    tmp_path: Path, over: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_plan(tmp_path / "new", over, **options)
    assert not (tmp_path / "new").exists()


def test_a_missing_optuna_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingDependencyError, match=r"--search tpe: needs optuna; run `pip install optuna`"):
        make_plan(tmp_path, "optimizer.lr=1e-3..1", search="tpe")
    make_plan(tmp_path, "optimizer.lr=1e-3,1")  # a grid does not need it


def test_a_second_sweep_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    lease = Lease.acquire(tmp_path, owner="other")
    with pytest.raises(RunDirectoryError, match="another driver"):
        run(make_plan(tmp_path, "optimizer.lr=1e-3"))
    lease.release()


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"search": ')
    with pytest.raises(RunDirectoryError, match="cannot be read; choose another run.dir"):
        make_plan(tmp_path, "optimizer.lr=1e-3")


def test_metrics_are_followed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricFollower(path, "val/loss")
    assert not follower.read_new_points()
    path.write_text('{"step": 1, "val/loss": 3.0}\n{"step": 2}\n{"step": 3, "val/lo')
    assert follower.read_new_points() and follower.points == {1: 3.0}
    with path.open("a") as file:
        file.write('ss": 2.5}\n{"step": 4, "val/loss": NaN}\n{"step": 1, "val/loss": 2.9}\n')
    assert follower.read_new_points() and follower.points == {1: 2.9, 3: 2.5}
    assert not follower.read_new_points()


def test_a_record_that_cannot_be_written_is_an_alarm(tmp_path: Path) -> None:
    lines: list[str] = []
    plan = make_plan(tmp_path, "optimizer.lr=1e-3", at_once=1)

    def log(line: str) -> None:
        (tmp_path / "sweep.json").mkdir(exist_ok=True)  # in the way of the file, from the first line on
        lines.append(line)

    assert [trial.state for trial in run(plan, log).trials] == ["done"]
    assert any(
        line.startswith("alarm: ") and line.endswith("cannot be written: Is a directory; the sweep continues")
        for line in lines
    )
