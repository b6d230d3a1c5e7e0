"""Entry point of `raytrain-hpc`: one command per file of this package, imported when the command is used."""

from __future__ import annotations

import os
from importlib import import_module

import click

# In the order of --help. Each command is in the module of the same name, with `_` for `-`.
COMMANDS = (
    "train",
    "plan",
    "config",
    "recipes",
    "run",
    "prepare",
    "inspect",
    "generate",
    "status",
    "resize",
    "sweep",
    "report",
    "export",
    "import-hf",
    "import-dcp",
    "drill",
    "doctor",
    "bench",
)


class LazyGroup(click.Group):
    """Click group that imports a command's module on first use, so that `train` does not import what `bench` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of --help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of this name, or None if there is none; click then lists similar names."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"{__package__}.{name}"), name)
        return command


if "_RAYTRAIN_HPC_COMPLETE" in os.environ:  # set by the completion script of the shell
    from raytrain_hpc.cli.completion import register_bash_completion

    register_bash_completion()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="raytrain-hpc")
def main() -> None:
    """Fault-tolerant, elastic LLM training on Ray.

    Settings are key=value words: `raytrain-hpc config` lists all keys, `raytrain-hpc recipes` complete configurations.
    Completion in bash: eval "$(_RAYTRAIN_HPC_COMPLETE=bash_source raytrain-hpc)", likewise zsh_source and fish_source.
    """
