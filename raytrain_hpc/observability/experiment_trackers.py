"""Experiment trackers: Weights & Biases and MLflow, each imported only if the config asks for it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytrain_hpc.callbacks.callback import DriverCallback
from raytrain_hpc.callbacks.plugins import get_tracker_factory
from raytrain_hpc.config.schema import Config, to_dict
from raytrain_hpc.errors import MissingDependencyError
from raytrain_hpc.storage.location import parse_location
from raytrain_hpc.storage.working_copy import get_working_directory


def check_trackers(config: Config) -> None:
    """Raise MissingDependencyError if a tracker that the config asks for is not installed, ConfigError if unknown."""
    for key, package in (("wandb_project", "wandb"), ("mlflow_uri", "mlflow")):
        value = getattr(config.logging, key)
        if value and find_spec(package) is None:
            raise MissingDependencyError(f"logging.{key}={value}: not installed; run `pip install {package}`")
    for name in config.logging.trackers:
        get_tracker_factory(name, config)


def list_tracker_factories(config: Config) -> dict[str, Callable[[], DriverCallback]]:
    """Return what creates the trackers that the config asks for, by name. They log in when they are created."""
    factories: dict[str, Callable[[], DriverCallback]] = {}
    if config.logging.wandb_project:
        factories["logging.wandb_project"] = partial(WandbTracker, config)
    if config.logging.mlflow_uri:
        factories["logging.mlflow_uri"] = partial(MlflowTracker, config)
    for name in config.logging.trackers:
        factories[f"logging.trackers={name}"] = partial(get_tracker_factory(name, config), config)
    return factories


class WandbTracker(DriverCallback):
    """Weights & Biases tracker of `logging.wandb_project`. WANDB_MODE=offline keeps the data on this machine."""

    optional = True

    def __init__(self, config: Config):
        import wandb

        run_dir = get_working_directory(parse_location(config.run.dir)).absolute()
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

    def on_metrics(self, metrics: dict[str, Any]) -> None:
        """Log the metrics of a step."""
        self._run.log(_select_known(metrics))

    def on_finished(self, outcome: str) -> None:
        """Finish the tracker's run."""
        self._run.finish(exit_code=int(outcome == "failed"))


class MlflowTracker(DriverCallback):
    """MLflow tracker; `logging.mlflow_uri` is its URI. A resumed run continues the MLflow run of its directory."""

    optional = True

    def __init__(self, config: Config):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=config.logging.mlflow_uri)
        experiment = self._client.get_experiment_by_name("raytrain_hpc")
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment("raytrain_hpc")
        tag, tracking_id = "raytrain_hpc.run", _get_tracking_id(get_working_directory(parse_location(config.run.dir)))
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

    def on_metrics(self, metrics: dict[str, Any]) -> None:
        """Log the metrics of a step."""
        timestamp_ms, step = int(metrics["time/unix"] * 1000), int(metrics["step"])
        batch = [self._metric(key, float(value), timestamp_ms, step) for key, value in _select_known(metrics).items()]
        self._client.log_batch(self._run, metrics=batch)

    def on_finished(self, outcome: str) -> None:
        """Finish the tracker's run."""
        self._client.set_terminated(self._run, status="FAILED" if outcome == "failed" else "FINISHED")


def _select_known(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that have a value: the MFU has none if the peak of the device is unknown."""
    return {key: value for key, value in metrics.items() if value is not None}


def _get_tracking_id(run_dir: Path) -> str:
    """Return the tracking id of a run directory, created once and stored in it.

    A resumed run keeps its id; a new run in a deleted and recreated directory gets another one.
    """
    path = run_dir / ".tracked"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
