"""`raytrain-hpc generate`: sample text from a checkpoint."""

from __future__ import annotations

from typing import Any

import click

from raytrain_hpc.cli.options import WEIGHTS, StepOrLabel, print_errors_on_one_line


@click.command()
@click.argument("run_dir")
@click.option("--prompt", help="Text to continue.  [default: a line break]")
@click.option("--max-tokens", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(min=0))
@click.option(
    "--top-k",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Sample from the k most likely tokens; 0: from all.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--step", type=StepOrLabel(), help="Step or label of the checkpoint.  [default: the newest valid one]")
@click.option("--weights", default="averaged", type=WEIGHTS, help="Averages of a callback, if there are any, or not.")
@print_errors_on_one_line
def generate(run_dir: str, prompt: str | None, **options: Any) -> None:
    """Sample text from a run's newest checkpoint."""
    from raytrain_hpc.text_generation import generate as sample

    pieces = sample(run_dir, prompt, **options)
    first = next(pieces, "")  # raises errors before anything is printed
    click.echo((prompt or "") + first, nl=False)
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()
