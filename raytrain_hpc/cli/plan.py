"""`raytrain-hpc plan`: choose and explain a parallel layout without a cluster."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from raytrain_hpc.cli.options import (
    CONFIG_WORDS,
    EXIT_DOES_NOT_FIT,
    EXIT_FAILED,
    POSITIVE_FLOAT,
    ConfigCommand,
    print_errors_on_one_line,
    split_words,
)


@click.command(cls=ConfigCommand)
@click.argument("words", nargs=-1, metavar="[CONFIG] [key=value ...]", type=CONFIG_WORDS)
@click.option("--workers", type=click.IntRange(min=1), help="Plan for this number of workers, 8 per node.")
@click.option("--nodes", type=click.IntRange(min=1), help="Plan for this number of nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Devices per node.  [default: 8]")
@click.option(
    "--device",
    help="a100, h100, h200, b200, mi300x, mi250x, pvc, pvc-tile or cpu; override its numbers as in h100,memory_gib=64.",
)
@click.option("--running", is_flag=True, help="Plan for the Ray cluster that is running.")
@click.option(
    "--inside", default="", help="Link inside a node, such as nvlink4 or pcie,gbs=20.  [default: the device's]"
)
@click.option("--across", default="", help="Link between nodes: infiniband-ndr, slingshot, ethernet, ...")
@click.option("--tokens", type=POSITIVE_FLOAT, help="Tokens to train on.  [default: those of train.steps]")
@click.option(
    "--device-hours",
    default=50_000.0,
    show_default=True,
    type=POSITIVE_FLOAT,
    help="Mean time between failures of one device, in hours.",
)
@click.option(
    "--restart-seconds",
    default=300.0,
    show_default=True,
    type=POSITIVE_FLOAT,
    help="Time to restart all workers from a checkpoint.",
)
@click.option("--measure", type=click.IntRange(min=1), help="Train the best N layouts on the running cluster instead.")
@click.option(
    "--steps", default=8, show_default=True, type=click.IntRange(min=1), help="Steps per layout, with --measure."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all legal layouts, ranked.")
@print_errors_on_one_line
def plan(
    words: tuple[str, ...], restart_seconds: float, measure: int | None, steps: int, as_json: bool, **options: Any
) -> None:
    """Show the best layout and why, whether it fits, its expected speed, and the cost of failures.

    Needs no cluster, torch or GPU, except with --running and --measure. Keys of parallel and train.micro_batch_size
    also take `auto` or a list to choose from.

    Exit code 1: no layout fits into memory; each remedy that is printed would make one fit.
    Exit code 4: --measure could train no layout.
    """
    from raytrain_hpc.api import plan as make_plan
    from raytrain_hpc.cli.plan_table import format_plan
    from raytrain_hpc.config.loader import load_command_line

    path, overrides = split_words(words)
    if measure:
        from raytrain_hpc.cli.autotune import measure_layouts

        tuned = measure_layouts(
            load_command_line(path, overrides), measure, steps, lambda line: click.echo(line, err=True)
        )
        for line in [json.dumps(tuned.to_json(), indent=2)] if as_json else tuned.format_lines():
            click.echo(line)
        if not tuned.has_measurement:
            sys.exit(EXIT_FAILED)
        return
    result = make_plan(load_command_line(path, overrides), restart_s=restart_seconds, **options)
    for line in [json.dumps(result, indent=2)] if as_json else format_plan(result):
        click.echo(line)
    if not result["fits"]:
        sys.exit(EXIT_DOES_NOT_FIT)
