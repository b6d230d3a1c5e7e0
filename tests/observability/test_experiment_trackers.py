"""Experiment trackers: the real libraries offline, failing servers, and imports only on request."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.callbacks.callback import DriverCallback, DriverControl
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver import driver_callbacks
from raytrain_hpc.driver.driver_callbacks import DriverCallbackList
from raytrain_hpc.errors import CallbackError, MissingDependencyError
from raytrain_hpc.observability import experiment_trackers
from raytrain_hpc.observability.experiment_trackers import check_trackers, list_tracker_factories
from tests.run_report.run_directories import make_metrics

STEPS = [
    make_metrics(1),
    make_metrics(2),
    make_metrics(2, **{"train/loss": 3.5}),
    make_metrics(3, **{"val/loss": 2.5}),
]  # step 2 is repeated


@pytest.fixture(autouse=True)
def wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer at the end of a run: a busy machine takes more than ten seconds to start wandb's process."""
    monkeypatch.setattr(driver_callbacks, "_CLOSE_TIMEOUT_S", 60.0)


def start_callbacks(factories: dict[str, Any], warnings: list[str]) -> DriverCallbackList:
    control = DriverControl(lambda: warnings.append("stop"), lambda workers: None)
    return DriverCallbackList(factories, control, warnings.append)


def run_trackers(config: Any) -> list[str]:
    """Log STEPS with the tracker of the config and close it; return the warnings."""
    warnings: list[str] = []
    trackers = start_callbacks(list_tracker_factories(config), warnings)
    for metrics in STEPS:
        trackers.call("on_metrics", metrics)
    trackers.close("done")
    return warnings


def test_wandb_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    config = load_config(None, [f"run.dir={tmp_path}", "logging.wandb_project=project", "run.name=mine"])
    assert run_trackers(config) == []
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # wandb's process still writes for a moment
    while len(rows := _read_history(file)) < len(STEPS) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 8.0), (2, 4.0), (2, 3.5), (3, 8.0 / 3)]
    assert rows[-1]["val/loss"] == 2.5 and "throughput/mfu" not in rows[0]


def _read_history(file: Path) -> list[dict[str, float]]:
    """Return the history rows of a .wandb file: protobuf messages in LevelDB's log format, after a 7-byte header."""
    from wandb.proto import wandb_internal_pb2

    data, rows, message, offset = file.read_bytes(), [], b"", 7
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # too short for a header: the rest of the block is padding
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        message += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a full record, or the last fragment of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_mlflow_logs_to_files_and_a_resumed_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    uri = f"file://{tmp_path / 'mlruns'}"
    config = load_config(
        None, [f"run.dir={tmp_path}", f"logging.mlflow_uri={uri}", "run.name=mine", "optimizer.lr=0.5"]
    )
    assert run_trackers(config) == []
    assert run_trackers(config) == []  # the same run, resumed
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("raytrain_hpc")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["optimizer.lr"]) == ("mine", "FINISHED", "0.5")
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert losses == 2 * [(1, 8.0), (2, 4.0), (2, 3.5), (3, 8.0 / 3)]


class Failing(DriverCallback):
    def on_metrics(self, metrics: dict[str, Any]) -> None:
        raise ConnectionError("no server")

    def on_finished(self, outcome: str) -> None:
        raise AssertionError("called after a failure")


def test_failing_optional_callback_is_dropped_with_one_warning() -> None:
    class Optional(Failing):
        optional = True

    warnings: list[str] = []
    callbacks = start_callbacks({"logging.mlflow_uri": Optional}, warnings)
    for metrics in STEPS:
        callbacks.call("on_metrics", metrics)
    callbacks.close("done")
    callbacks.raise_error()
    assert warnings == ["logging.mlflow_uri: stopped (ConnectionError: no server); the run continues"]


def test_tracker_that_cannot_be_created_is_dropped() -> None:
    def fail_to_log_in() -> DriverCallback:
        raise PermissionError("no account")

    warnings: list[str] = []
    callbacks = start_callbacks({"logging.wandb_project": fail_to_log_in}, warnings)
    callbacks.close("done")
    assert warnings == ["logging.wandb_project: stopped (PermissionError: no account); the run continues"]


def test_failing_callback_of_the_user_stops_the_run() -> None:
    warnings: list[str] = []
    callbacks = start_callbacks({"Failing": Failing}, warnings)
    for metrics in STEPS:
        callbacks.call("on_metrics", metrics)
    callbacks.close("stopped")
    assert warnings == ["callback Failing: failed (ConnectionError: no server); the run stops", "stop"]
    with pytest.raises(CallbackError, match="callback Failing: failed in the driver: ConnectionError: no server"):
        callbacks.raise_error()


def test_unresponsive_server_does_not_delay_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(driver_callbacks, "_CLOSE_TIMEOUT_S", 0.2)

    class Slow(DriverCallback):
        def on_metrics(self, metrics: dict[str, Any]) -> None:
            release.wait()

    warnings: list[str] = []
    callbacks, start = start_callbacks({"logging.wandb_project": Slow}, warnings), time.monotonic()
    for metrics in STEPS:
        callbacks.call("on_metrics", metrics)
    callbacks.close("done")
    assert time.monotonic() - start < 5
    assert warnings == ["logging.wandb_project: still busy 0.2 s after the end of the run"]
    release.set()


def test_a_callback_that_hangs_misses_events_instead_of_filling_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    started, release, seen = threading.Event(), threading.Event(), list[Any]()
    monkeypatch.setattr(driver_callbacks, "_MAX_EVENTS", 3)

    class Hanging(DriverCallback):
        def on_metrics(self, metrics: dict[str, Any]) -> None:
            started.set()
            release.wait()
            seen.append(metrics["step"])

        def on_finished(self, outcome: str) -> None:
            seen.append(outcome)

    warnings: list[str] = []
    callbacks = start_callbacks({"tracker": Hanging}, warnings)
    callbacks.call("on_metrics", {"step": 1})
    started.wait(60)
    for step in range(2, 100):
        callbacks.call("on_metrics", {"step": step})
    assert warnings == ["tracker: 3 events behind; it misses further ones; the run continues"]
    release.set()
    callbacks.close("done")
    assert seen == [1, 2, 3, 4, "done"]


@pytest.mark.parametrize(("key", "name"), [("wandb_project", "wandb"), ("mlflow_uri", "mlflow")])
def test_missing_tracker_is_reported_before_anything_starts(
    key: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_trackers, "find_spec", lambda package: None)
    check_trackers(load_config(None, []))
    with pytest.raises(MissingDependencyError, match=f"run `pip install {name}`"):
        check_trackers(load_config(None, [f"logging.{key}=x"]))


def test_trackers_are_imported_only_on_request() -> None:
    code = (
        "import sys; from raytrain_hpc.driver import supervisor; from raytrain_hpc.config.loader import load_config; "
        "from raytrain_hpc.observability.experiment_trackers import list_tracker_factories; "
        "assert not list_tracker_factories(load_config(None, [])); "
        "found = {'wandb', 'mlflow', 'transformers', 'peft', 'ray'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
