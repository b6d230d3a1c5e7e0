"""`raytrain-hpc train`: train a model from a config file and key=value settings."""

from __future__ import annotations

import sys

import click

from raytrain_hpc.cli.options import EXIT_STOPPED, print_errors_on_one_line, split_words


@click.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@print_errors_on_one_line
def train(words: tuple[str, ...]) -> None:
    """Train a model. Without a config: a small byte-level model of the Python standard library's source code."""
    from raytrain_hpc.config.loader import load_config

    path, overrides = split_words(words)
    config = load_config(path, overrides)
    from raytrain_hpc.api import train as run_training
    from raytrain_hpc.cli.train_summary import format_summary, sample_text

    result = run_training(config)
    for line in sample_text(config, result):
        click.echo(line)
    for line in format_summary(config, result):
        click.echo(line)
    if result.outcome == "stopped":
        sys.exit(EXIT_STOPPED)
