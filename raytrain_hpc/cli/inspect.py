"""`raytrain-hpc inspect`: show what a dataset contains."""

from __future__ import annotations

import click

from raytrain_hpc.cli.options import print_errors_on_one_line


@click.command()
@click.argument("directory")
@print_errors_on_one_line
def inspect(directory: str) -> None:
    """Show the contents of a dataset: counts, tokenizer, checksums, a decoded sample."""
    from raytrain_hpc.data.dataset.inspect import describe

    click.echo(describe(directory))
