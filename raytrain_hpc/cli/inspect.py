"""`raytrain-hpc inspect`: show what a dataset contains."""

from __future__ import annotations

import click

from raytrain_hpc.cli.options import print_errors_on_one_line


@click.command()
@click.argument("dataset")
@print_errors_on_one_line
def inspect(dataset: str) -> None:
    """Show the contents of a dataset: counts, tokenizer, checksums, a decoded sample.

    DATASET is a directory that `prepare` wrote, stdlib or synthetic, as in data.path.
    """
    from raytrain_hpc.data.dataset.sources import describe_source

    click.echo(describe_source(dataset))
