"""Helpers shared by commands: config arguments, option types, exit codes, and one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from raytrain_hpc.errors import ConfigError, RaytrainError

EXIT_STOPPED = 3  # exit code of a run that was stopped on request, with a checkpoint saved
POSITIVE_FLOAT = click.FloatRange(min=0, min_open=True)


def print_errors_on_one_line(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: print a RaytrainError as one line on stderr and exit with its code, without a traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except RaytrainError as error:
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("error: interrupted before the state was saved", err=True)
            sys.exit(4)

    return run


def split_words(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Split `[CONFIG.yaml] [key=value ...]`, in any order, into the config file and the overrides.

    Raises:
        ConfigError: More than one config file is named.
    """
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(
            "config", files[1], "command line", f"one config file at a time; remove this one or {files[0]}"
        )
    return (files[0] if files else None), [word for word in words if "=" in word]
