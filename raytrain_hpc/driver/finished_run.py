"""A run that has nothing left to do: found before anything is started, and answered with its stored result."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.manifest import Checkpoint
from raytrain_hpc.driver.result import Result
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.driver.run_setup import PreparedRun
from raytrain_hpc.optim.lr_scheduler import should_evaluate
from raytrain_hpc.runtime.worker_spec import Script


def find_pending_eval_metrics(run: PreparedRun, step: int, last_metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return the metrics of `step` if its evaluation is due but not in them, otherwise None.

    `last_metrics`: metrics that are known already, those of `step` or of another one. None also if there are no metrics
    of `step` or no validation data, and for a script, which evaluates by itself.
    """
    if not step or run.dataset.val is None or not should_evaluate(run.config.eval, step, run.config.train.steps):
        return None
    if isinstance(run.custom, Script):
        return None
    metrics = find_step_metrics(run, step, last_metrics)
    return None if metrics is None or "val/loss" in metrics else metrics


def find_step_metrics(run: PreparedRun, step: int, last_metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return the recorded metrics of `step`, or None if there are none. `last_metrics`: known already, of any step."""
    return dict(last_metrics) if last_metrics.get("step") == step else run.directory.read_step_metrics(step)


def load_finished_run(run: PreparedRun) -> Result | None:
    """Return the result of a run that has its checkpoint of the last step and no evaluation pending, otherwise None.

    No file is changed, except that a result.json that is missing or of an earlier step, because the driver was killed,
    is written. One that cannot be read is kept, and the result is built from the other files.
    """
    newest = run.newest_checkpoint
    if newest is None or newest.step < run.config.train.steps or find_pending_eval_metrics(run, newest.step, {}):
        return None
    stored = _read_result(run.directory)
    is_outdated = stored is not None and stored.steps != newest.step
    result = _rebuild_result(run.directory, newest) if stored is None or is_outdated else stored
    if is_outdated or not run.directory.result.exists():
        lease = Lease.acquire(run.directory.location, owner=run.config.run.name)
        try:
            with run.directory.keep_uploaded():
                run.directory.write_result(result.to_json())
        finally:
            lease.release()
    return replace(result, outcome="done", checkpoint=str(newest.path), run_dir=run.config.run.dir)


def _read_result(directory: RunDirectory) -> Result | None:
    """Return the content of result.json, or None if it is missing, unreadable or lacks keys of today."""
    try:
        return Result.from_json(json.loads(directory.result.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _rebuild_result(directory: RunDirectory, newest: Checkpoint) -> Result:
    """Return the result as far as the other files tell: the times are those from the first step to the last."""
    lines = [metrics for metrics in directory.read_valid_metrics() if metrics["step"] <= newest.step]
    losses = [metrics["val/loss"] for metrics in lines if "val/loss" in metrics]
    productive_s = sum(metrics["time/step_s"] for metrics in lines)
    last = lines[-1] if lines else {}
    wall_s = last["time/unix"] - lines[0]["time/unix"] + lines[0]["time/step_s"] if lines else 0.0
    plan = directory.path / "plan.json"
    return Result(
        outcome="done",
        train_loss=last.get("train/loss"),
        val_loss=losses[-1] if losses else None,
        best_val_loss=min(losses, default=None),
        steps=newest.step,
        tokens=last.get("train/tokens", 0),
        wall_s=wall_s,
        goodput=min(1.0, productive_s / wall_s) if wall_s else 0.0,  # the two clocks differ by rounding
        restarts=sum("world" in incident for incident in directory.read_incidents()),
        layout=json.loads(plan.read_text())["layout"] if plan.exists() else {},
        checkpoint=str(newest.path),
        run_dir=str(directory.location),
        startup={},
    )
