"""`raytrain-hpc plan`: choose and explain a parallel layout without a cluster."""

from __future__ import annotations

import json
from typing import Any

import click

from raytrain_hpc.cli.options import POSITIVE_FLOAT, one_line_errors, split_words


@click.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@click.option("--workers", type=click.IntRange(min=1), help="Plan for this many workers, 8 a node.")
@click.option("--nodes", type=click.IntRange(min=1), help="Plan for this many nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Devices of a node.  [default: 8]")
@click.option(
    "--device", help="a100, h100, h200, b200, mi300x, pvc or cpu; with numbers of your own: h100,memory_gib=64."
)
@click.option("--running", is_flag=True, help="Plan for the Ray cluster that is running.")
@click.option("--inside", default="", help="Link inside a node, as nvlink4 or pcie,gbs=20.  [default: the device's]")
@click.option("--across", default="", help="Link across nodes, as infiniband-ndr, slingshot or ethernet.")
@click.option("--tokens", type=POSITIVE_FLOAT, help="Tokens to train on.  [default: those of train.steps]")
@click.option(
    "--device-hours",
    default=50_000.0,
    show_default=True,
    type=POSITIVE_FLOAT,
    help="Hours in which a device fails once.",
)
@click.option(
    "--restart-seconds",
    default=300.0,
    show_default=True,
    type=POSITIVE_FLOAT,
    help="Starting all again from a checkpoint.",
)
@click.option("--measure", type=click.IntRange(min=1), help="Train the first so many on the running cluster instead.")
@click.option("--steps", default=8, show_default=True, type=click.IntRange(min=1), help="Of each, with --measure.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all legal layouts, ranked.")
@one_line_errors
def plan(
    words: tuple[str, ...], restart_seconds: float, measure: int | None, steps: int, as_json: bool, **options: Any
) -> None:
    """Show which layout is best and why, whether it fits, how fast it is, and what failures cost.

    Needs no cluster, torch or GPU, but with --measure. Keys of parallel and train.micro_batch also take `auto` or a
    list to choose from.
    """
    from raytrain_hpc.api import plan as make_plan
    from raytrain_hpc.cli.plan_table import format_plan
    from raytrain_hpc.config.loader import load_config

    path, overrides = split_words(words)
    if measure:
        from raytrain_hpc.cli.autotune import measure_layouts as measured

        trials = measured(load_config(path, overrides), measure, steps, lambda line: click.echo(line, err=True))
        for line in [json.dumps(trials.to_json(), indent=2)] if as_json else trials.format_lines():
            click.echo(line)
        return
    made = make_plan(load_config(path, overrides), restart_s=restart_seconds, **options)
    for line in [json.dumps(made, indent=2)] if as_json else format_plan(made):
        click.echo(line)
