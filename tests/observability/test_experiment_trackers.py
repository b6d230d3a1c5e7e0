"""Experiment trackers: the real libraries offline, failing servers, and imports only on request."""

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
]  # step 2 is repeated


def run_trackers(config: Any) -> list[str]:
    """Log STEPS with the tracker of the config and close it; return the warnings."""
    warnings: list[str] = []
    (tracker,) = create_trackers(config, warnings.append)
    for metrics in STEPS:
        tracker.write(metrics)
    tracker.close(failed=False)
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


def test_failing_tracker_is_dropped_with_one_warning() -> None:
    class Failing:
        def write(self, metrics: Mapping[str, Any]) -> None:
            raise ConnectionError("no server")

        def close(self, *, failed: bool) -> None:
            raise AssertionError("closed after a failure")

    warnings: list[str] = []
    tracker = BackgroundTracker("mlflow_uri", Failing, warnings.append)
    for metrics in STEPS:
        tracker.write(metrics)
    tracker.close(failed=False)
    assert warnings == ["logging.mlflow_uri: stopped (ConnectionError: no server); the run continues"]


def test_unresponsive_server_does_not_delay_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(experiment_trackers, "_CLOSE_TIMEOUT_S", 0.2)

    class Slow:
        def write(self, metrics: Mapping[str, Any]) -> None:
            release.wait()

        def close(self, *, failed: bool) -> None:
            pass

    warnings: list[str] = []
    tracker, start = BackgroundTracker("wandb_project", Slow, warnings.append), time.monotonic()
    for metrics in STEPS:
        tracker.write(metrics)
    tracker.close(failed=False)
    assert time.monotonic() - start < 5
    assert warnings == ["logging.wandb_project: metrics still unsent after 0.2 s"]
    release.set()


@pytest.mark.parametrize(("key", "name"), [("wandb_project", "wandb"), ("mlflow_uri", "mlflow")])
def test_missing_tracker_is_reported_before_anything_starts(
    key: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_trackers, "find_spec", lambda package: None)
    check_trackers(load_config(None, []).logging)
    with pytest.raises(MissingDependencyError, match=f"run `pip install {name}`"):
        check_trackers(load_config(None, [f"logging.{key}=x"]).logging)


def test_trackers_are_imported_only_on_request() -> None:
    code = (
        "import sys; from raytrain_hpc.driver import supervisor; from raytrain_hpc.config.loader import load_config; "
        "from raytrain_hpc.observability.experiment_trackers import create_trackers; "
        "assert not create_trackers(load_config(None, []), print); "
        "found = {'wandb', 'mlflow', 'transformers', 'peft', 'ray'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
