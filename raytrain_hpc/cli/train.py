"""`raytrain-hpc train`: train a model from a config file and key=value settings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from raytrain_hpc.cli.options import CONFIG_WORDS, EXIT_STOPPED, ConfigCommand, print_errors_on_one_line, split_words

if TYPE_CHECKING:
    from raytrain_hpc.config.schema import Config


@click.command(cls=ConfigCommand)
@click.argument("words", nargs=-1, metavar="[CONFIG] [key=value ...]", type=CONFIG_WORDS)
@print_errors_on_one_line
def train(words: tuple[str, ...]) -> None:
    """Train a model. Without a config: a small byte-level model of the Python standard library's source code.

    CONFIG is a YAML file or a recipe (`raytrain-hpc recipes`); `raytrain-hpc config` lists the keys, and
    `raytrain-hpc config --print [CONFIG] [key=value ...]` shows what would be used and where it was set.
    """
    from raytrain_hpc.config.loader import load_command_line

    path, overrides = split_words(words)
    train_and_summarize(load_command_line(path, overrides))


def train_and_summarize(config: Config, arguments: Mapping[str, Any] | None = None) -> None:
    """Train with keyword arguments of `api.train`, and print the results. Exit with EXIT_STOPPED if it was stopped."""
    from raytrain_hpc.api import train as run_training
    from raytrain_hpc.cli.train_summary import format_summary, sample_text

    result = run_training(config, **(arguments or {}))
    for line in sample_text(config, result):
        click.echo(line)
    for line in format_summary(config, result):
        click.echo(line)
    if result.outcome == "stopped":
        sys.exit(EXIT_STOPPED)
