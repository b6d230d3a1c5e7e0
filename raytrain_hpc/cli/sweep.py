"""`raytrain-hpc sweep`: train with several settings or layouts, side by side where there is room, and compare them."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from raytrain_hpc.cli.options import (
    CONFIG_WORDS,
    EXIT_FAILED,
    EXIT_STOPPED,
    ConfigCommand,
    IntOrAuto,
    print_errors_on_one_line,
    split_words,
)
from raytrain_hpc.config.loader import load_command_line
from raytrain_hpc.sweeps.sweep_plan import SweepOptions, SweepPlan
from raytrain_hpc.sweeps.sweep_runner import run_sweep
from raytrain_hpc.sweeps.sweep_table import write_report


def make_options(
    *, over: tuple[str, ...], search: str, trials: int | None, at_once: int | str, **options: Any
) -> SweepOptions:
    """Return the options of a sweep from those of the command line."""
    return SweepOptions(
        over=over,
        search=search,  # type: ignore[arg-type]
        num_trials=trials,
        at_once=None if at_once == "auto" else int(at_once),
        **options,
    )


@click.command(cls=ConfigCommand)
@click.argument("words", nargs=-1, metavar="[CONFIG] [key=value ...]", type=CONFIG_WORDS)
@click.option(
    "--over",
    multiple=True,
    required=True,
    metavar="KEY=VALUES",
    help="A key to vary, with values (optimizer.beta2=0.95,0.99) or a range (optimizer.lr=1e-4..1e-2). A range can end "
    "in :log, :linear or :step=NUMBER; it is logarithmic by default if its ends are above 0 and differ by a factor of "
    "100 or more. Repeat the option for several keys.",
)
@click.option(
    "--search",
    type=click.Choice(["grid", "random", "tpe"]),
    default="grid",
    show_default=True,
    help="grid: all combinations of the values; random: settings drawn at random; tpe: settings close to those of good "
    "trials (tree-structured Parzen estimator). random and tpe need optuna.",
)
@click.option("--trials", type=click.IntRange(min=1), help="Number of trials, with random and tpe.  [default: 20]")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the search, with random and tpe."
)
@click.option(
    "--metric", default="val/loss", show_default=True, help="Metric to compare trials by: a key of metrics.jsonl."
)
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    default="min",
    show_default=True,
    help="Whether a low or a high value of the metric is better.",
)
@click.option(
    "--stop-bad",
    is_flag=True,
    help="Stop a trial, with its state saved, when its best value of the metric is worse than the median of the other "
    "trials at the same step.",
)
@click.option(
    "--min-steps",
    type=click.IntRange(min=0),
    help="Steps before which --stop-bad stops no trial.  [default: a quarter of train.steps]",
)
@click.option(
    "--at-once",
    type=IntOrAuto(),
    default="auto",
    show_default=True,
    help="Trials to run at a time; auto: as many as fit on the free GPUs or CPUs, with tpe at most a quarter of all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@print_errors_on_one_line
def sweep(words: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Train with several settings or layouts, and compare them in a table and a report.

    Each trial is a run in a directory below run.dir. The same command continues an interrupted sweep. Exit code 4: a
    trial has failed.
    """
    source, overrides = split_words(words)
    plan = SweepPlan(load_command_line(source, overrides), make_options(**options))
    result = run_sweep(plan, log=lambda line: click.echo(line, err=True))
    trials = result.sort()
    if as_json:
        click.echo(json.dumps([trial.to_json() | trial.read_columns() for trial in trials], indent=2))
        write_report(trials, plan.directory)
    else:
        click.echo(result)
        click.echo(f"report: {write_report(trials, plan.directory) or 'none, as no trial has begun'}")
        best = f"raytrain-hpc generate {trials[0].run_dir}" if trials else ""
        click.echo(f"next: {best if result.is_complete else 'repeat the same command to continue'}")
    if not result.is_complete:
        sys.exit(EXIT_STOPPED)
    if any(trial.state == "failed" for trial in trials):
        sys.exit(EXIT_FAILED)
