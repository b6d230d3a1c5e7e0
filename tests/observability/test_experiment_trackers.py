"""Trackers: the real libraries, offline; servers that are wrong or gone; and nothing imported that nobody asked for."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import MissingDependencyError
from raytrain_hpc.observability import experiment_trackers
from raytrain_hpc.observability.experiment_trackers import BackgroundTracker, check_trackers, create_trackers
from tests.run_report.run_directories import make_metrics

STEPS = [
    make_metrics(1),
    make_metrics(2),
    make_metrics(2, **{"train/loss": 3.5}),
    make_metrics(3, **{"val/loss": 2.5}),
]  # the second is run again


def run_trackers(config: Any) -> list[str]:
    """Pass the steps on to what the settings ask for, to the end; the alarms that came."""
    alarms: list[str] = []
    (behind,) = create_trackers(config, alarms.append)
    for metrics in STEPS:
        behind.write(metrics)
    behind.close(failed=False)
    return alarms


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    config = load_config(None, [f"run.dir={tmp_path}", "observe.wandb=project", "run.name=mine"])
    assert run_trackers(config) == []
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # its own process writes a moment longer
    while len(found := _read_history(file)) < len(STEPS) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [(row["step"], row["train/loss"]) for row in found] == [(1, 8.0), (2, 4.0), (2, 3.5), (3, 8.0 / 3)]
    assert found[-1]["val/loss"] == 2.5 and "throughput/mfu" not in found[0]


def _read_history(file: Path) -> list[dict[str, float]]:
    """The rows of history in its file: records in LevelDB's log format, behind a header of 7 bytes, as its messages."""
    from wandb.proto import wandb_internal_pb2

    data, rows, whole, at = file.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too short for a header: the rest of a block is nothing
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_mlflow_in_files_and_a_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = f"file://{tmp_path / 'mlruns'}"
    config = load_config(None, [f"run.dir={tmp_path}", f"observe.mlflow={uri}", "run.name=mine", "train.lr=0.5"])
    assert run_trackers(config) == []
    assert run_trackers(config) == []  # the same run, once more
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("raytrain_hpc")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["train.lr"]) == ("mine", "FINISHED", "0.5")
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert losses == 2 * [(1, 8.0), (2, 4.0), (2, 3.5), (3, 8.0 / 3)]


def test_a_tracker_that_fails_is_given_up_with_one_alarm() -> None:
    class Failing:
        def write(self, metrics: Mapping[str, Any]) -> None:
            raise ConnectionError("nobody is there")

        def close(self, *, failed: bool) -> None:
            raise AssertionError("given up already")

    alarms: list[str] = []
    behind = BackgroundTracker("mlflow", Failing, alarms.append)
    for metrics in STEPS:
        behind.write(metrics)
    behind.close(failed=False)
    assert alarms == ["observe.mlflow: given up (ConnectionError: nobody is there); the run goes on"]


def test_a_server_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(experiment_trackers, "_CLOSE_TIMEOUT_S", 0.2)

    class Slow:
        def write(self, metrics: Mapping[str, Any]) -> None:
            answers.wait()

        def close(self, *, failed: bool) -> None:
            pass

    alarms: list[str] = []
    behind, began = BackgroundTracker("wandb", Slow, alarms.append), time.monotonic()
    for metrics in STEPS:
        behind.write(metrics)
    behind.close(failed=False)
    assert time.monotonic() - began < 5
    assert alarms == ["observe.wandb: its server has not taken everything within 0.2 s"]
    answers.set()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_what_is_missing_is_said_before_anything_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_trackers, "find_spec", lambda package: None)
    check_trackers(load_config(None, []).observe)
    with pytest.raises(MissingDependencyError, match=f"run `pip install {name}`"):
        check_trackers(load_config(None, [f"observe.{name}=there"]).observe)


def test_nothing_is_imported_that_nobody_asked_for() -> None:
    code = (
        "import sys; from raytrain_hpc.driver import supervisor; from raytrain_hpc.config.loader import load_config; "
        "from raytrain_hpc.observability.experiment_trackers import create_trackers; "
        "assert not create_trackers(load_config(None, []), print); "
        "found = {'wandb', 'mlflow', 'transformers', 'peft', 'ray'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
