"""The files of a run directory have exactly the documented keys."""

from __future__ import annotations

import errno
import json
import os
import platform
import tempfile
import threading
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raytrain_hpc import Config, Result, load_config, start, train
from raytrain_hpc.driver.run_directory import RunDirectory, read_run_directory
from raytrain_hpc.driver.supervisor import Supervisor
from raytrain_hpc.errors import RunDirectoryError
from raytrain_hpc.observability.metrics import METRIC_KEYS
from raytrain_hpc.storage.object_path import ObjectPath
from raytrain_hpc.storage.working_copy import WorkingCopy
from raytrain_hpc.text_generation import load_model
from tests.warm_pool import make_small_config


@dataclass
class FinishedRun:
    """A tiny run of three steps in this process, without Ray, evaluated after the last two steps."""

    path: Path
    result: Result
    metrics: list[dict[str, Any]]

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    path = tmp_path_factory.mktemp("run") / "run"
    words = ["eval.interval=2", "train.steps=3", "logging.peak_tflops=0.01", "logging.tensorboard=true"]
    words += ["logging.rank_stats_interval=2"]
    result = train(make_small_config(path, "cluster.workers=0", "cluster.device=cpu", *words), quiet=True)
    return FinishedRun(path, result, [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()])


def test_metrics_have_exactly_the_documented_keys(run: FinishedRun) -> None:
    assert [line["step"] for line in run.metrics] == [1, 2, 3]
    for line in run.metrics:
        absent = {"elastic/audited", "val/loss"} if line["step"] == 1 else {"elastic/audited"}
        absent |= {key for key in METRIC_KEYS if key.startswith("ranks/")} if line["step"] != 2 else set()
        assert set(line) == set(METRIC_KEYS) - absent
        assert line["time/step_s"] > line["time/data_s"] >= 0
        assert line["throughput/tokens_per_sec"] == pytest.approx(12 * 16 / line["time/step_s"])
        assert line["train/tokens"] == line["step"] * 12 * 16


def test_tensorboard_has_the_same_keys_and_values(run: FinishedRun) -> None:
    events = EventAccumulator(str(run.path / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {key for key in METRIC_KEYS if "/" in key} - {"elastic/audited"}
    for key in ("train/loss", "val/loss"):
        shown = [(event.step, event.value) for event in events.Scalars(key)]
        assert shown == [(m["step"], pytest.approx(m[key], rel=1e-6)) for m in run.metrics if key in m]


def test_result_has_the_documented_keys(run: FinishedRun) -> None:
    result = run.json("result.json")
    documented = {"train/loss", "val/loss", "best_val_loss", "steps", "tokens", "wall_s", "goodput", "restarts"}
    assert documented | {"layout", "checkpoint"} <= set(result)
    assert result["train/loss"] == run.metrics[-1]["train/loss"] == run.result.train_loss
    assert result["val/loss"] == run.metrics[-1]["val/loss"] == run.result.val_loss
    assert result["best_val_loss"] == min(m["val/loss"] for m in run.metrics if "val/loss" in m)
    assert (result["steps"], result["tokens"], result["restarts"]) == (3, 3 * 12 * 16, 0)
    assert 0 < result["goodput"] < 1
    assert Path(result["checkpoint"]) == run.path / "checkpoints" / "step-00000003"


def test_workers_file_has_the_documented_keys(run: FinishedRun) -> None:
    (worker,) = run.json("workers.json")["workers"]
    assert {"rank", "pid", "node", "device", "coordinates"} <= set(worker)
    assert (worker["rank"], worker["pid"], worker["device"]) == (0, os.getpid(), "cpu")
    assert worker["coordinates"] == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0}
    assert worker["cpu"] and worker["memory_gib"] is None


def test_software_start_and_size_of_the_run_are_recorded(run: FinishedRun) -> None:
    versions = run.json("workers.json")["versions"]
    assert {"python", "raytrain-hpc", "torch", "ray"} <= set(versions)
    assert (versions["python"], versions["torch"]) == (platform.python_version(), torch.__version__)
    plan = run.json("plan.json")
    assert run.metrics[0]["time/unix"] - 60 < plan["started"] < run.metrics[0]["time/unix"]
    model, _ = load_model(RunDirectory(run.path))
    assert plan["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_a_sample_is_stored_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for answer in ("a\nb", "a\nb", "c"):
        directory.append_sample(3, "\n", answer)
    lines = [json.loads(line) for line in directory.samples.read_text().splitlines()]
    assert lines == [{"step": 3, "prompt": "\n", "answer": answer} for answer in ("a\nb", "c")]


def test_the_result_of_an_earlier_start_is_removed_from_an_object_store(folder: ObjectPath, tmp_path: Path) -> None:
    def begin(name: str) -> RunDirectory:
        """Return the directory of a driver that has just begun to train."""
        (tmp_path / name).mkdir()
        directory = RunDirectory(folder, print, tmp_path / name)
        assert directory.working_copy is not None
        directory.working_copy.download()
        directory.write_start(make_small_config(tmp_path / "run"), {}, None)
        return directory

    first = begin("first")
    first.write_result({"outcome": "done"})
    first.upload()
    second = begin("second")
    assert not second.result.exists() and (folder / "result.json").is_file()
    second.upload()
    assert not (folder / "result.json").is_file()
    second.write_result({"outcome": "stopped"})
    second.upload()
    third = begin("third")
    third.write_result({"outcome": "done"})  # before the object of the second start was deleted
    third.upload()
    assert json.loads((folder / "result.json").read_bytes()) == {"outcome": "done"}
    fourth = begin("fourth")
    (folder / "result.json").write_bytes(b"{}")
    fourth.upload()
    assert (folder / "result.json").read_bytes() == b"{}", "another driver has taken over and written it"


def test_a_run_that_cannot_be_read_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(copy: WorkingCopy) -> None:
        (copy.path / "config.yaml").write_text("")
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(WorkingCopy, "download", refuse)
    with pytest.raises(RunDirectoryError, match="cannot be read: denied"):
        read_run_directory("s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


def test_written_config_is_the_config_of_the_run(run: FinishedRun) -> None:
    loaded = load_config(run.path / "config.yaml")
    assert loaded.eval.interval == 2
    assert loaded.run.dir == str(run.path)
    assert run.json("plan.json")["layout"] == run.json("result.json")["layout"]


def test_a_run_in_the_background_keeps_its_settings_and_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop over settings changes one config for one run after the other."""
    for name in ("work", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    gate, train_now = threading.Event(), Supervisor.run
    monkeypatch.setattr(Supervisor, "run", lambda supervisor: gate.wait(60) and train_now(supervisor))
    config = make_small_config("first", "cluster.workers=0", "cluster.device=cpu", "train.steps=3")
    handle = start(config)
    config.run.dir, config.train.steps, config.optimizer.lr = "second", 2, 0.5
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.set()
    handle.watch()
    assert not handle.running, "outside of a notebook it waits"
    result = handle.result(60)
    assert (result.steps, result.run_dir) == (3, str(tmp_path / "work" / "first"))
    assert [line["step"] for line in handle.metrics()] == [1, 2, 3]
    assert [path.name for path in tmp_path.glob("*/*")] == ["first"]
    recorded = load_config(tmp_path / "work" / "first" / "config.yaml")
    assert (recorded.optimizer.lr, recorded.train.steps) == (make_small_config().optimizer.lr, 3)


def test_a_config_is_left_as_it_was(tmp_path: Path) -> None:
    """A dataset of the caller's own fits some settings to itself."""
    config = make_small_config(tmp_path, "cluster.workers=0", "cluster.device=cpu", "train.steps=2")
    del config.origins["train.seq_len"]
    before = deepcopy(config)
    train(config, model=build_scale, loss=compute_square, dataset=[torch.ones(1)] * 12, quiet=True)
    assert config == before


def build_scale(config: Config) -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def compute_square(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) ** 2).sum()


def test_no_temporary_files_remain(run: FinishedRun) -> None:
    names = {entry.name for entry in run.path.iterdir() if not entry.name.startswith(".")}
    documented = {"config.yaml", "plan.json", "workers.json", "metrics.jsonl", "tb", "checkpoints", "result.json"}
    assert names == documented | {"lease.json"}
    assert [entry.name for entry in (run.path / "checkpoints").iterdir()] == ["step-00000003"]
