"""Python API of sweeps: `rt.sweep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Unpack

from raytrain_hpc.api import TrainArguments, check_train_arguments
from raytrain_hpc.config.schema import Config
from raytrain_hpc.sweeps.parameter import format_parameters
from raytrain_hpc.sweeps.search_algorithm import SearchName
from raytrain_hpc.sweeps.sweep_plan import SweepOptions, SweepPlan
from raytrain_hpc.sweeps.sweep_result import SweepResult
from raytrain_hpc.sweeps.sweep_runner import run_sweep
from raytrain_hpc.sweeps.sweep_table import write_report
from raytrain_hpc.sweeps.trial import Mode


def sweep(
    config: Config,
    over: Mapping[str, Any] | Sequence[str],
    *,
    search: SearchName = "grid",
    trials: int | None = None,
    seed: int = 0,
    metric: str = "val/loss",
    mode: Mode = "min",
    stop_bad: bool = False,
    min_steps: int | None = None,
    at_once: int | None = None,
    quiet: bool = False,
    **train_arguments: Unpack[TrainArguments],
) -> SweepResult:
    """Train with several settings or layouts, side by side where there is room, and compare them in a report.

    Each trial is a run in a directory below `run.dir`, in a process of its own. Ctrl-C and SIGTERM save and stop all
    trials; so does the end of this process, even by SIGKILL. The same call, or the same `raytrain-hpc sweep`, continues
    the sweep: finished trials are not run again. A failed trial does not end it.

    Args:
        config: Common settings, from `load_config`. It does not change.
        over: Keys to vary: {"optimizer.lr": [1e-3, 3e-3]} lists values, and {"optimizer.lr": "1e-4..1e-2"} is a range,
            which can end in ":log", ":linear" or ":step=NUMBER". Or a list of texts as of `--over`.
        search: "grid": all combinations; "random"; "tpe": settings close to those of good trials. random and tpe need
            optuna.
        trials: Number of trials of a random or tpe search; 20 by default.
        seed: Seed of a random or tpe search.
        metric: Metric to compare trials by: a key of metrics.jsonl.
        mode: Whether a low ("min") or a high ("max") value of the metric is better.
        stop_bad: Stop a trial, with its state saved, when its best value of the metric is worse than the median of the
            other trials at the same step.
        min_steps: Steps before which `stop_bad` stops no trial; a quarter of train.steps by default.
        at_once: Trials to run at a time. By default as many as fit on the free GPUs or CPUs, with tpe at most a quarter
            of all.
        quiet: Print nothing.
        train_arguments: `model`, `loss`, `plan`, `dataset`, `val_dataset`, `collate_fn`, `lengths`, `callbacks` and
            `lr_schedule`, as of `train`. Each trial gets a copy, pickled as Ray pickles arguments of its workers:
            functions and classes of a notebook by value, those of a module by name. `model` receives the config of
            its trial, so it can depend on what is varied. A `DriverCallback` runs in the process of its trial: read
            the results from the run directories, not from attributes of the object that was passed. A resumed sweep
            takes the objects of the new call.

    Raises:
        ConfigError: A setting or an argument is invalid, or run.dir has another sweep.
        ModelError: A part of the model is missing or cannot be pickled.
        MissingDependencyError: optuna is needed and not installed.
        RunDirectoryError: Another sweep runs in the directory, or the directory cannot be written.
        ClusterError: Ray cannot be reached or started.
    """
    parameters = format_parameters(over)
    options = SweepOptions(parameters, search, trials, seed, metric, mode, stop_bad, min_steps, at_once)
    plan = SweepPlan(deepcopy(config), options, has_own_metrics=bool(train_arguments))
    if train_arguments:
        check_train_arguments(deepcopy(config), train_arguments)
    result = run_sweep(plan, train_arguments, log=(lambda line: None) if quiet else print)
    return replace(result, report=write_report(result.sort(), plan.directory))
