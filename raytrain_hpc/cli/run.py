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


class ScriptCommand(ConfigCommand):
    """Command whose arguments after the first `--` are those of the user's script. Click itself drops the `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the arguments of the script aside, and parse the others."""
        end = args.index("--") if "--" in args else len(args)
        ctx.obj = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])


@click.command(cls=ScriptCommand)
@click.argument("script")
@click.argument("words", nargs=-1, metavar="[CONFIG] [key=value ...] [-- ARGS ...]", type=CONFIG_WORDS)
@click.pass_obj
@print_errors_on_one_line
def run(script_arguments: tuple[str, ...], script: str, words: tuple[str, ...]) -> None:
    """Run your own training script (rt.attach) on the workers; repeat the command to resume.

    ARGS after `--` are passed to the script (sys.argv).
    """
    from pathlib import Path

    from raytrain_hpc.api import run_script
    from raytrain_hpc.cli.train_summary import format_summary
    from raytrain_hpc.config.loader import load_command_line

    path, overrides = split_words(words)
    config = load_command_line(path, overrides, defaults=[f"run.name={Path(script).stem}", *_SCRIPT_DEFAULTS])
    result = run_script(config, script, script_arguments)
    for line in format_summary(config, result, is_script=True):
        click.echo(line)
    if result.outcome == "stopped":
        sys.exit(EXIT_STOPPED)
