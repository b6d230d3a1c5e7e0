"""`raytrain-hpc run`: run a user's own training script on the workers."""

from __future__ import annotations

import sys

import click

from raytrain_hpc.cli.options import CONFIG_WORDS, EXIT_STOPPED, ConfigCommand, print_errors_on_one_line, split_words

_SCRIPT_DEFAULTS = (
    "data.path=synthetic",
    "data.engine=local",
    "model.vocab_size=2",
)  # the script has its own data and model


@click.command(cls=ConfigCommand)
@click.argument("script")
@click.argument("words", nargs=-1, metavar="[CONFIG] [key=value ...]", type=CONFIG_WORDS)
@print_errors_on_one_line
def run(script: str, words: tuple[str, ...]) -> None:
    """Run your own training script (rt.attach) on the workers; repeat the command to resume."""
    from pathlib import Path

    from raytrain_hpc.api import run_script
    from raytrain_hpc.cli.train_summary import format_summary
    from raytrain_hpc.config.loader import load_config

    path, overrides = split_words(words)
    config = load_config(path, overrides, defaults=[f"run.name={Path(script).stem}", *_SCRIPT_DEFAULTS])
    result = run_script(config, script)
    for line in format_summary(config, result, is_script=True):
        click.echo(line)
    if result.outcome == "stopped":
        sys.exit(EXIT_STOPPED)
