"""Experiment trackers: Weights & Biases and MLflow, each imported only if the config asks for it.

Every tracker reads from a queue in its own thread, so that a slow or failing server never delays or ends a run.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from raytrain_hpc.config.schema import Config, LoggingConfig, to_dict
from raytrain_hpc.errors import MissingDependencyError

WarningCallback = Callable[[str], None]
Metrics = Mapping[str, Any]
_CLOSE_TIMEOUT_S = 10.0  # longest wait at the end of a run for metrics still in the queue


class Tracker(Protocol):
    """Interface of an experiment tracker. The methods may raise any exception of the tracker's library."""

    def write(self, metrics: Metrics) -> None:
        """Log the metrics of a step. After a failure, repeated steps are logged again."""

    def close(self, *, failed: bool) -> None:
        """Finish the tracker's run. `failed`: the run ended with an error."""


def check_trackers(config: LoggingConfig) -> None:
    """Raise MissingDependencyError if a tracker that the config asks for is not installed."""
    for key, package in (("wandb_project", "wandb"), ("mlflow_uri", "mlflow")):
        if getattr(config, key) and find_spec(package) is None:
            raise MissingDependencyError(
                f"logging.{key}={getattr(config, key)}: not installed; run `pip install {package}`"
            )


def create_trackers(config: Config, on_warning: WarningCallback) -> list[BackgroundTracker]:
    """Create the trackers that the config asks for. They log in from their threads, so the run does not wait for it."""
    trackers = []
    if config.logging.wandb_project:
        trackers.append(BackgroundTracker("wandb_project", lambda: WandbTracker(config), on_warning))
    if config.logging.mlflow_uri:
        trackers.append(BackgroundTracker("mlflow_uri", lambda: MlflowTracker(config), on_warning))
    return trackers


class BackgroundTracker:
    """Tracker in its own thread. It is dropped after its first failure, with one warning."""

    def __init__(self, name: str, create_tracker: Callable[[], Tracker], on_warning: WarningCallback):
        self._name, self._create_tracker, self._on_warning = name, create_tracker, on_warning
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, metrics: Metrics) -> None:
        """Queue the metrics of a step. Does not block."""
        if self._thread.is_alive():
            self._queue.put({key: value for key, value in metrics.items() if value is not None})

    def close(self, *, failed: bool) -> None:
        """Wait until all queued metrics are sent, for at most 10 s."""
        self._failed = failed
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._on_warning(f"logging.{self._name}: metrics still unsent after {_CLOSE_TIMEOUT_S:g} s")

    def _run(self) -> None:
        try:
            tracker = self._create_tracker()
            while (metrics := self._queue.get()) is not None:
                tracker.write(metrics)
            tracker.close(failed=self._failed)
        except Exception as error:  # no error of a tracker may end the run
            reason = " ".join(str(error).split())[:300]
            self._on_warning(f"logging.{self._name}: stopped ({type(error).__name__}: {reason}); the run continues")


class WandbTracker:
    """Weights & Biases tracker of `logging.wandb_project`. WANDB_MODE=offline keeps the data on this machine."""

    def __init__(self, config: Config):
        import wandb

        run_dir = Path(config.run.dir).absolute()
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=config.run.name,
            id=_get_tracking_id(run_dir),
            resume="allow",
            dir=run_dir,
            config=to_dict(config),
        )
        # W&B's built-in step counter rejects steps that are repeated after a failure.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(metrics))

    def close(self, *, failed: bool) -> None:
        """Finish the tracker's run."""
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """MLflow tracker; `logging.mlflow_uri` is its URI. A resumed run continues the MLflow run of its directory."""

    def __init__(self, config: Config):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=config.logging.mlflow_uri)
        experiment = self._client.get_experiment_by_name("raytrain_hpc")
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment("raytrain_hpc")
        tag, tracking_id = "raytrain_hpc.run", _get_tracking_id(Path(config.run.dir).absolute())
        runs = self._client.search_runs([experiment_id], filter_string=f"tags.`{tag}` = '{tracking_id}'", max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        run = self._client.create_run(experiment_id, run_name=config.run.name, tags={tag: tracking_id})
        self._run = run.info.run_id
        settings = to_dict(config)
        params = [
            Param(f"{section}.{name}", str(value)[:500])
            for section, keys in settings.items()
            for name, value in keys.items()
        ]
        for start in range(0, len(params), 100):  # the maximum per call
            self._client.log_batch(self._run, params=params[start : start + 100])

    def write(self, metrics: Metrics) -> None:
        """Log the metrics of a step."""
        timestamp_ms = int(metrics["time/unix"] * 1000)
        batch = [self._metric(key, float(value), timestamp_ms, int(metrics["step"])) for key, value in metrics.items()]
        self._client.log_batch(self._run, metrics=batch)

    def close(self, *, failed: bool) -> None:
        """Finish the tracker's run."""
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


def _get_tracking_id(run_dir: Path) -> str:
    """Return the tracking id of a run directory, created once and stored in it.

    A resumed run keeps its id; a new run in a deleted and recreated directory gets another one.
    """
    path = run_dir / ".tracked"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
