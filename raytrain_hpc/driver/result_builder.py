"""Builder of a run's result from what the recorder has counted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.result import Result
from raytrain_hpc.driver.run_recorder import RunRecorder
from raytrain_hpc.planner.layout import Layout


def build_result(
    config: Config,
    initial_layout: Layout,
    recorder: RunRecorder,
    outcome: str,
    restarts: int,
    timestamps: Mapping[str, float],
    rank_infos: Sequence[Mapping[str, Any]],
) -> Result:
    """Return the result: losses, steps and tokens of the whole run; times and restarts of this driver.

    `timestamps`: unix times at which the driver "began" and had its "cluster". `rank_infos`: host facts of the ranks of
    the first generation.
    """
    totals, wall_s = recorder.totals, time.time() - timestamps["began"]
    return Result(
        outcome=outcome,
        train_loss=totals.last_metrics.get("train/loss"),
        val_loss=totals.val_loss,
        best_val_loss=totals.best_val_loss,
        steps=totals.last_metrics.get("step", 0),
        tokens=totals.last_metrics.get("train/tokens", 0),
        wall_s=wall_s,
        goodput=totals.productive_step_s / wall_s,
        restarts=restarts,
        layout=asdict(initial_layout),
        checkpoint=totals.checkpoint_path,
        run_dir=config.run.dir,
        startup=compute_startup_times(recorder, timestamps, rank_infos),
    )


def compute_startup_times(
    recorder: RunRecorder, timestamps: Mapping[str, float], rank_infos: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the seconds of each startup phase, which ends when its last rank ends it; {} without a committed step."""
    built = [record["unix"] for record in recorder.ready_records.values()]
    if not built or recorder.totals.first_step_unix is None:
        return {}
    ends = {
        "cluster_s": timestamps["cluster"],
        "actors_s": max(info["began"] for info in rank_infos),
        "imports_s": max(info["imported"] for info in rank_infos),
        "model_s": max(built),
        "first_step_s": recorder.totals.first_step_unix,
    }
    seconds, previous_end = {}, timestamps["began"]
    for phase, end in ends.items():
        seconds[phase], previous_end = max(0.0, end - previous_end), max(previous_end, end)
    return seconds | {"total_s": recorder.totals.first_step_unix - timestamps["began"]}
