"""Experiment trackers beside the run's own files: Weights & Biases, MLflow. Imported only where they are asked for.

A tracker stands behind a queue with a thread of its own: a server that is slow, gone or wrong never holds up a run, and
never ends one.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from raytrain_hpc.config.schema import Config, ObserveConfig, to_dict
from raytrain_hpc.errors import MissingDependencyError

WarningCallback = Callable[[str], None]
Metrics = Mapping[str, Any]
_CLOSE_TIMEOUT_S = 10.0  # what is on its way to a server is waited for so long at the end


class Tracker(Protocol):
    """Where metrics go. Any method may raise anything: it is other people's code and other people's servers."""

    def write(self, metrics: Metrics) -> None:
        """Add a step; one that is run again comes again."""

    def close(self, *, failed: bool) -> None:
        """No more will come; `failed`: because the run ended with an error."""


def check_trackers(observe: ObserveConfig) -> None:
    """Raise MissingDependency where a tracker that is asked for is not installed."""
    for key, package in (("wandb", "wandb"), ("mlflow", "mlflow")):
        if getattr(observe, key) and find_spec(package) is None:
            raise MissingDependencyError(
                f"observe.{key}={getattr(observe, key)}: not installed; run `pip install {package}`"
            )


def create_trackers(config: Config, on_warning: WarningCallback) -> list[BackgroundTracker]:
    """Those that are asked for, each behind a thread. They come up there, so that nobody waits for a login."""
    found = []
    if config.observe.wandb:
        found.append(BackgroundTracker("wandb", lambda: WandbTracker(config), on_warning))
    if config.observe.mlflow:
        found.append(BackgroundTracker("mlflow", lambda: MlflowTracker(config), on_warning))
    return found


class BackgroundTracker:
    """A tracker in a thread of its own. After its first failure it is given up, with one alarm."""

    def __init__(self, name: str, create_tracker: Callable[[], Tracker], on_warning: WarningCallback):
        self._name, self._create_tracker, self._on_warning = name, create_tracker, on_warning
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def write(self, metrics: Metrics) -> None:
        """Pass on a step's numbers; returns at once."""
        if self._thread.is_alive():
            self._queue.put({key: value for key, value in metrics.items() if value is not None})

    def close(self, *, failed: bool) -> None:
        """Wait, for a while, until everything is passed on."""
        self._failed = failed
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._on_warning(f"observe.{self._name}: its server has not taken everything within {_CLOSE_TIMEOUT_S:g} s")

    def _run(self) -> None:
        try:
            tracker = self._create_tracker()
            while (metrics := self._queue.get()) is not None:
                tracker.write(metrics)
            tracker.close(failed=self._failed)
        except Exception as error:  # whatever their code raises, the run is worth more
            reason = " ".join(str(error).split())[:300]
            self._on_warning(f"observe.{self._name}: given up ({type(error).__name__}: {reason}); the run goes on")


class WandbTracker:
    """Weights & Biases; `observe.wandb` names the project. WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, config: Config):
        import wandb

        run_dir = Path(config.run.dir).absolute()
        self._run = wandb.init(
            project=config.observe.wandb,
            name=config.run.name,
            id=_get_tracking_id(run_dir),
            resume="allow",
            dir=run_dir,
            config=to_dict(config),
        )
        # Steps can come again after a fault: W&B's own counter would refuse them.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, metrics: Metrics) -> None:
        """As `Tracker.write`."""
        self._run.log(dict(metrics))

    def close(self, *, failed: bool) -> None:
        """As `Tracker.close`."""
        self._run.finish(exit_code=int(failed))


class MlflowTracker:
    """MLflow; `observe.mlflow` is the tracking URI. A run that goes on is found again by its directory."""

    def __init__(self, config: Config):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=config.observe.mlflow)
        experiment = self._client.get_experiment_by_name("raytrain_hpc")
        place = experiment.experiment_id if experiment else self._client.create_experiment("raytrain_hpc")
        key, run_dir = "raytrain_hpc.run", _get_tracking_id(Path(config.run.dir).absolute())
        before = self._client.search_runs([place], filter_string=f"tags.`{key}` = '{run_dir}'", max_results=1)
        if before:
            self._run = before[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        made = self._client.create_run(place, run_name=config.run.name, tags={key: run_dir})
        self._run = made.info.run_id
        plain = to_dict(config)
        params = [
            Param(f"{section}.{name}", str(value)[:500])
            for section, keys in plain.items()
            for name, value in keys.items()
        ]
        for first in range(0, len(params), 100):  # as many as a call may have
            self._client.log_batch(self._run, params=params[first : first + 100])

    def write(self, metrics: Metrics) -> None:
        """As `Tracker.write`."""
        at = int(metrics["time/unix"] * 1000)
        batch = [self._metric(key, float(value), at, int(metrics["step"])) for key, value in metrics.items()]
        self._client.log_batch(self._run, metrics=batch)

    def close(self, *, failed: bool) -> None:
        """As `Tracker.close`."""
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")


def _get_tracking_id(run_dir: Path) -> str:
    """The same for all lives of a run, and another one for whatever begins in its directory after it was removed."""
    path = run_dir / ".tracked"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
