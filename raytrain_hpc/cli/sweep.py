"""Several settings or layouts, in turn or side by side on one cluster, and one table of what became of them."""

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

from raytrain_hpc.cli.options import one_line_errors, split_words
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.run_report.run_reader import read_run

_COLUMNS = ("loss", "validation", "tokens/s", "mfu", "GiB", "seconds")


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: what it sets beside the common settings, where it lives, and its command's exit code."""

    overrides: tuple[str, ...]
    run_dir: Path
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The trial and its figures as JSON values."""
        return {
            "settings": list(self.overrides),
            "run_dir": str(self.run_dir),
            "exit_code": self.exit_code,
            **self.figures(),
        }

    def figures(self) -> dict[str, float | None]:
        """What its run directory says, under the names of the table's columns."""
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
    """Train once with every combination of the values in `over` ("train.lr=1e-3,3e-3", ...), `at_once` side by side.

    All go to the cluster that is named or running, or each starts a Ray of its own. Each has a directory of its own in
    the sweep's run.dir, its output in output.log there; one that is there already goes on, or is done. Raises
    ConfigError, before anything runs, where one of the combinations is wrong.
    """
    trials = build_trials(path, overrides, over)
    log(f"{len(trials)} runs in {trials[0].run_dir.parent}, {min(max_parallel, len(trials))} at a time")
    with ThreadPoolExecutor(max_parallel) as pool:

        def run(trial: Trial) -> Trial:
            done = _run_trial(trial, path, overrides)
            log(
                f"{' '.join(trial.overrides)}: {'done' if done.exit_code == 0 else f'exit code {done.exit_code}, see output.log'}"
            )
            return done

        return list(pool.map(run, trials))


def build_trials(path: str | None, overrides: Sequence[str], over: Sequence[str]) -> list[Trial]:
    """All runs of a sweep, each checked as a config. Raises ConfigError for the first wrong one."""
    choices = [_parse_choices(text) for text in over]
    if not choices:
        raise ConfigError("--over", "", "command line", "name what to vary, as in --over train.lr=1e-3,3e-3")
    base = Path(load_config(path, overrides).run.dir)
    trials = []
    for chosen in product(*choices):
        run_dir = base / ",".join(word.replace("/", "_") for word in chosen)
        load_config(path, [*overrides, *chosen, f"run.dir={run_dir}"])
        trials.append(Trial(chosen, run_dir))
    return trials


def _parse_choices(text: str) -> list[str]:
    """ "train.lr=1e-3,3e-3" as ["train.lr=1e-3", "train.lr=3e-3"]; commas inside brackets divide nothing."""
    key, equals, values = text.partition("=")
    chosen, depth = [""], 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            chosen.append("")
        else:
            chosen[-1] += character
    if not key or not equals or not all(one.strip() for one in chosen):
        raise ConfigError("--over", text, "command line", "is written key=value,value,...")
    return [f"{key}={one.strip()}" for one in chosen]


def _run_trial(trial: Trial, path: str | None, overrides: Sequence[str]) -> Trial:
    trial.run_dir.mkdir(parents=True, exist_ok=True)
    given = [] if path is None else [path]
    line = [
        sys.executable,
        "-m",
        "raytrain_hpc",
        "train",
        *given,
        *overrides,
        *trial.overrides,
        f"run.dir={trial.run_dir}",
    ]
    with (trial.run_dir / "output.log").open("a") as output:
        done = subprocess.run(line, stdout=output, stderr=subprocess.STDOUT, check=False)
    return Trial(trial.overrides, trial.run_dir, done.returncode)


def format_table(trials: Sequence[Trial]) -> list[str]:
    """Lines of text, the best validation loss (or training loss) first; failed runs last."""
    rows = [(trial, trial.figures()) for trial in trials]

    def best_first(row: tuple[Trial, dict[str, float | None]]) -> tuple[bool, float]:
        loss = row[1]["validation"] if row[1]["validation"] is not None else row[1]["loss"]
        return row[0].exit_code not in (0, None) or loss is None, loss or 0.0

    rows.sort(key=best_first)
    cells = [["run", *_COLUMNS]]
    for trial, figures in rows:
        shown = ["-" if figures[name] is None else f"{figures[name]:.5g}" for name in _COLUMNS]
        failed = "" if trial.exit_code in (0, None) else f" (exit code {trial.exit_code})"
        cells.append([" ".join(trial.overrides) + failed, *shown])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


@click.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@click.option(
    "--over", multiple=True, required=True, help="key=value,value,...: what to vary; several: every combination."
)
@click.option("--at-once", default=1, show_default=True, type=click.IntRange(min=1), help="Runs side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@one_line_errors
def sweep(words: tuple[str, ...], over: tuple[str, ...], at_once: int, as_json: bool) -> None:
    """Train with several settings or layouts, in turn or side by side, and compare them in one table."""
    path, overrides = split_words(words)
    trials = run_sweep(path, overrides, over, max_parallel=at_once, log=lambda line: click.echo(line, err=True))
    for line in [json.dumps([one.to_json() for one in trials], indent=2)] if as_json else format_table(trials):
        click.echo(line)
    if not as_json:
        click.echo(f"next: raytrain-hpc report {trials[0].run_dir.parent}/* --out sweep.html")
    if any(one.exit_code for one in trials):
        sys.exit(4)
