"""Callbacks of whole runs on Ray: state through a kill, a resize and a restart, and callbacks in the driver."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc import EMA, CallbackError, ConfigError, DriverCallback, KeepBest, start, train
from raytrain_hpc.callbacks import plugins
from tests.callbacks.recording_callbacks import Counters
from tests.warm_pool import make_small_config

STEPS = 30
BASE = [f"train.steps={STEPS}", "train.micro_batch_size=2", "train.deterministic=elastic", "eval.interval=4"]


class WritingCounters(Counters):
    """Write the state at the end of a generation, and the number of steps that it had at its start."""

    def pre_train(self) -> None:
        self.start = self.num_steps

    def post_step(self, metrics: dict[str, Any]) -> None:
        super().post_step(metrics)
        if (self.context.run_dir / "slow").exists():  # until workers have joined
            time.sleep(0.6)

    def close(self) -> None:
        state = {"start": self.start, "steps": self.num_steps, "losses": self.losses}
        path = self.context.run_dir / f"state-{self.context.generation:03d}-{self.context.rank}.json"
        path.write_text(json.dumps(state | {"histogram": self.histogram.tolist(), "world": self.context.world_size}))


class Events(DriverCallback):
    """Record every event of the driver."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_metrics(self, metrics: dict[str, Any]) -> None:
        self.events.append(("metrics", metrics["step"], metrics.get("val/loss")))

    def on_incident(self, incident: dict[str, Any]) -> None:
        self.events.append(("incident", incident["kind"], incident["recovered_s"] is not None))

    def on_checkpoint_published(self, step: int, path: Path) -> None:
        self.events.append(("checkpoint", step, path.is_dir()))

    def on_membership_changed(self, world_size: int, generation: int) -> None:
        self.events.append(("membership", world_size))

    def on_finished(self, outcome: str) -> None:
        self.events.append(("finished", outcome))

    def select(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]


def read_last_states(directory: Path) -> list[dict[str, Any]]:
    """Return the states that the ranks of the last generation wrote."""
    paths = sorted(directory.glob("state-*.json"))
    last = paths[-1].name.split("-")[1]
    return [json.loads(path.read_text()) for path in paths if path.name.split("-")[1] == last]


def read_curve(directory: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Return the losses and validation losses by step; the last line of a step counts."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    val_losses = {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    return {line["step"]: line["train/loss"] for line in lines}, val_losses


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Events]:
    directory, events = tmp_path_factory.mktemp("undisturbed"), Events()
    config = make_small_config(directory, *BASE, "cluster.workers=2", "checkpoint.interval=10")
    train(config, callbacks=[WritingCounters(), EMA(0.9), KeepBest(), events], quiet=True)
    return directory, events


def test_driver_callbacks_see_all_events(undisturbed: Any) -> None:
    directory, events = undisturbed
    losses, val_losses = read_curve(directory)
    assert events.select("metrics") == [(step, val_losses.get(step)) for step in losses]
    assert events.select("membership") == [(2,)] and events.select("finished") == [("done",)]
    published = [step for step, _ in events.select("checkpoint")]
    assert {10, 20, STEPS} <= set(published) and all(exists for _, exists in events.select("checkpoint"))
    assert not events.select("incident")


@pytest.mark.parametrize("words", [["cluster.workers=3"], ["cluster.workers=2", "parallel.zero=3"]])
def test_state_survives_a_kill_and_a_resize(undisturbed: Any, tmp_path: Path, words: list[str]) -> None:
    """The last ranks have the state of the run without a fault: bit for bit, and also those that joined."""
    fault = "fault.inject=[{kind: kill, rank: 1, step: 4}]"
    config, events = make_small_config(tmp_path, *BASE, *words, fault, "checkpoint.interval=0"), Events()
    (tmp_path / "slow").touch()
    run = start(config, callbacks=[WritingCounters(), EMA(0.9), KeepBest(), events])
    run.resize(4)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        events.select("incident")[-1:] == [("died", True)] and events.select("membership")[-1:] == [(4,)]
    ):
        time.sleep(0.05)
    (tmp_path / "slow").unlink()
    assert run.result(60).outcome == "done"
    states = read_last_states(tmp_path)
    assert {state["world"] for state in states} == {4} and len(states) == 4
    assert all(0 < state["start"] < STEPS for state in states), "no rank started afresh"
    expected = read_last_states(undisturbed[0])[0]
    for state in states:
        assert all(state[key] == expected[key] for key in ("steps", "losses", "histogram"))
    assert read_curve(tmp_path) == read_curve(undisturbed[0]), "the evaluations are those of the averages"
    assert events.select("incident") == [("died", False), ("died", True)]
    assert [size for (size,) in events.select("membership")][-1] == 4


def test_state_survives_a_restart(undisturbed: Any, tmp_path: Path) -> None:
    """Stopped by a callback in the driver, resumed by the same call on more workers."""

    class StopAt(DriverCallback):
        def on_metrics(self, metrics: dict[str, Any]) -> None:
            if metrics["step"] >= 3:
                self.control.stop()

    words = [*BASE, "checkpoint.interval=0"]
    callbacks = [WritingCounters(), EMA(0.9), KeepBest()]
    config = make_small_config(tmp_path, *words, "cluster.workers=2")
    (tmp_path / "slow").touch()
    assert train(config, callbacks=[*callbacks, StopAt()], quiet=True).outcome == "stopped"
    (tmp_path / "slow").unlink()
    config = make_small_config(tmp_path, *words, "cluster.workers=3", "parallel.zero=1")
    assert train(config, callbacks=callbacks, quiet=True).outcome == "done"
    expected = read_last_states(undisturbed[0])[0]
    for state in read_last_states(tmp_path):
        assert state["start"] >= 3 and all(state[key] == expected[key] for key in ("steps", "losses", "histogram"))
    assert read_curve(tmp_path) == read_curve(undisturbed[0])
    labels = [json.loads((path / "checkpoints/labels.json").read_text()) for path in (tmp_path, undisturbed[0])]
    assert labels[0] == labels[1]


def test_a_failing_callback_of_a_rank_ends_the_run_with_its_name(ray_cluster: None, tmp_path: Path) -> None:
    from tests.callbacks.recording_callbacks import Failing

    config = make_small_config(tmp_path, *BASE, "cluster.workers=2")
    with pytest.raises(CallbackError, match="callback Failing: post_step failed on rank 1 at step 3: ValueError: no"):
        train(config, callbacks=[Failing("post_step", 3, rank=1)], quiet=True)


def test_a_failing_callback_of_the_driver_saves_and_ends_the_run(ray_cluster: None, tmp_path: Path) -> None:
    class Broken(DriverCallback):
        def on_metrics(self, metrics: dict[str, Any]) -> None:
            raise ValueError("no server")

    config = make_small_config(tmp_path, *BASE, "train.steps=100000", "cluster.workers=2")
    with pytest.raises(CallbackError, match="callback Broken: failed in the driver: ValueError: no server"):
        train(config, callbacks=[Broken()], quiet=True)
    assert list((tmp_path / "checkpoints").glob("step-*"))


class RegisteredTracker(Events):
    created: list[RegisteredTracker] = []
    finished = threading.Event()

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.created.append(self)


def test_packages_register_trackers_and_callbacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = "tests.callbacks.test_callbacks_on_a_cluster"
    entries = {
        plugins.TRACKER_GROUP: [EntryPoint("mine", f"{here}:RegisteredTracker", plugins.TRACKER_GROUP)],
        plugins.CALLBACK_GROUP: [EntryPoint("counters", f"{here}:WritingCounters", plugins.CALLBACK_GROUP)],
    }
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries[group])
    words = ["cluster.workers=0", "logging.trackers=[mine]", "train.callbacks=[counters]"]
    train(make_small_config(tmp_path, *words), quiet=True)
    (tracker,) = RegisteredTracker.created
    assert tracker.config.run.dir == str(tmp_path) and tracker.select("finished") == [("done",)]
    assert [step for step, _ in tracker.select("metrics")] == [1, 2, 3, 4, 5]
    assert read_last_states(tmp_path)[0]["steps"] == 5
    with pytest.raises(ConfigError, match="logging.trackers='yours' .*no such name; known: mine"):
        train(make_small_config(tmp_path / "x", "cluster.workers=0", "logging.trackers=[yours]"), quiet=True)


class DyingAfterTheUpdate(WritingCounters):
    """Kill rank 1 in `post_step`: the other ranks have applied the update and wait for it."""

    def post_step(self, metrics: dict[str, Any]) -> None:
        super().post_step(metrics)
        marker = self.context.run_dir / "killed"
        if (self.context.rank, self.context.step) == (1, 6) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("words", [["cluster.workers=3"], ["cluster.workers=3", "parallel.zero=3"]])
def test_a_rank_that_dies_between_the_update_and_the_commit_costs_no_step(
    undisturbed: Any, tmp_path: Path, words: list[str]
) -> None:
    config = make_small_config(tmp_path, *BASE, *words, "checkpoint.interval=0")
    train(config, callbacks=[DyingAfterTheUpdate(), EMA(0.9), KeepBest()], quiet=True)
    (incident,) = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert (incident["kind"], incident["steps_lost"]) == ("died", 0)
    expected = read_last_states(undisturbed[0])[0]
    for state in read_last_states(tmp_path):
        assert all(state[key] == expected[key] for key in ("steps", "losses", "histogram"))
    assert read_curve(tmp_path) == read_curve(undisturbed[0])
