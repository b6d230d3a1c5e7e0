"""`raytrain-hpc sweep`: train with several settings or layouts, one after another or in parallel, and compare them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from raytrain_hpc.cli.options import CONFIG_WORDS, ConfigCommand, print_errors_on_one_line, split_words
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.run_report.run_reader import read_run

_COLUMNS = ("loss", "validation", "tokens/s", "mfu", "GiB", "seconds")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its overrides of the common settings, its run directory, and the exit code of its command."""

    overrides: tuple[str, ...]
    run_dir: Path
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the trial and its metrics as JSON values."""
        return {
            "settings": list(self.overrides),
            "run_dir": str(self.run_dir),
            "exit_code": self.exit_code,
            **self.read_metrics(),
        }

    def read_metrics(self) -> dict[str, float | None]:
        """Read the metrics of the run from its directory, by column of the table; None where a value is missing."""
        if not (self.run_dir / "config.yaml").exists():
            return dict.fromkeys(_COLUMNS)
        run = read_run(self.run_dir)
        rates = sorted(rate for _, rate in run.get_points("throughput/tokens_per_sec"))
        last, result = run.last_metrics, run.result
        values = (
            last.get("train/loss"),
            result.get("val/loss"),
            rates[len(rates) // 2] if rates else None,
            last.get("throughput/mfu"),
            max((peak for _, peak in run.get_points("memory/peak_gib")), default=None),
            result.get("wall_s"),
        )
        return dict(zip(_COLUMNS, values, strict=True))


def run_sweep(
    path: str | None,
    overrides: Sequence[str],
    over: Sequence[str],
    *,
    max_parallel: int = 1,
    log: Callable[[str], None] = lambda line: None,
) -> list[Trial]:
    """Train every combination of the values in `over` ("train.steps=9,99", ...), at most `max_parallel` at a time.

    All runs use the configured or running cluster; without one, each starts its own Ray. Each run has a directory below
    the sweep's run.dir and writes its output to output.log there. An existing run is resumed, unless it is done.

    Raises:
        ConfigError: A combination is invalid. No run has been started then.
    """
    trials = build_trials(path, overrides, over)
    log(f"{len(trials)} runs in {trials[0].run_dir.parent}, {min(max_parallel, len(trials))} at a time")
    with ThreadPoolExecutor(max_parallel) as pool:

        def run(trial: Trial) -> Trial:
            finished = _run_trial(trial, path, overrides)
            log(
                f"{' '.join(trial.overrides)}: "
                f"{'done' if finished.exit_code == 0 else f'exit code {finished.exit_code}, see output.log'}"
            )
            return finished

        return list(pool.map(run, trials))


def build_trials(path: str | None, overrides: Sequence[str], over: Sequence[str]) -> list[Trial]:
    """Return all runs of a sweep.

    Raises:
        ConfigError: `over` is malformed, or the config of a run is invalid.
    """
    choices = [_parse_choices(text) for text in over]
    if not choices:
        raise ConfigError("--over", "", "command line", "name a key to vary, as in --over optimizer.lr=1e-3,3e-3")
    base = Path(load_config(path, overrides).run.dir)
    trials = []
    for chosen in product(*choices):
        run_dir = base / ",".join(word.replace("/", "_") for word in chosen)
        load_config(path, [*overrides, *chosen, f"run.dir={run_dir}"])
        trials.append(Trial(chosen, run_dir))
    return trials


def _parse_choices(text: str) -> list[str]:
    """Split "run.seed=1,2" into ["run.seed=1", "run.seed=2"], but not at commas inside brackets."""
    key, equals, values = text.partition("=")
    choices, depth = [""], 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            choices.append("")
        else:
            choices[-1] += character
    if not key or not equals or not all(choice.strip() for choice in choices):
        raise ConfigError("--over", text, "command line", "must have the form key=value,value,...")
    return [f"{key}={choice.strip()}" for choice in choices]


def _run_trial(trial: Trial, path: str | None, overrides: Sequence[str]) -> Trial:
    trial.run_dir.mkdir(parents=True, exist_ok=True)
    config_args = [] if path is None else [path]
    command = [
        sys.executable,
        "-m",
        "raytrain_hpc",
        "train",
        *config_args,
        *overrides,
        *trial.overrides,
        f"run.dir={trial.run_dir}",
    ]
    with (trial.run_dir / "output.log").open("a") as output:
        finished = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    return Trial(trial.overrides, trial.run_dir, finished.returncode)


def format_table(trials: Sequence[Trial]) -> list[str]:
    """Format the trials as a table, by validation loss (or else training loss); failed runs come last."""
    rows = [(trial, trial.read_metrics()) for trial in trials]

    def sort_key(row: tuple[Trial, dict[str, float | None]]) -> tuple[bool, float]:
        loss = row[1]["validation"] if row[1]["validation"] is not None else row[1]["loss"]
        return row[0].exit_code not in (0, None) or loss is None, loss or 0.0

    rows.sort(key=sort_key)
    cells = [["run", *_COLUMNS]]
    for trial, metrics in rows:
        values = ["-" if metrics[name] is None else f"{metrics[name]:.5g}" for name in _COLUMNS]
        failed = "" if trial.exit_code in (0, None) else f" (exit code {trial.exit_code})"
        cells.append([" ".join(trial.overrides) + failed, *values])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


@click.command(cls=ConfigCommand)
@click.argument("words", nargs=-1, metavar="[CONFIG] [key=value ...]", type=CONFIG_WORDS)
@click.option(
    "--over", multiple=True, required=True, help="key=value,value,...: values to try; repeat for all combinations."
)
@click.option("--at-once", default=1, show_default=True, type=click.IntRange(min=1), help="Runs at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@print_errors_on_one_line
def sweep(words: tuple[str, ...], over: tuple[str, ...], at_once: int, as_json: bool) -> None:
    """Train with several settings or layouts and compare them in one table."""
    path, overrides = split_words(words)
    trials = run_sweep(path, overrides, over, max_parallel=at_once, log=lambda line: click.echo(line, err=True))
    for line in [json.dumps([trial.to_json() for trial in trials], indent=2)] if as_json else format_table(trials):
        click.echo(line)
    if not as_json:
        click.echo(f"next: raytrain-hpc report {trials[0].run_dir.parent}/* --out sweep.html")
    if any(trial.exit_code for trial in trials):
        sys.exit(4)
