"""Helpers shared by commands: config arguments and their completion, option types, exit codes, one-line errors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from raytrain_hpc.config.schema import get_fields
from raytrain_hpc.errors import ConfigError, RaytrainError

EXIT_DOES_NOT_FIT = 1  # exit code of `plan` if no layout fits into memory
EXIT_STOPPED = 3  # exit code of a run that was stopped on request, with a checkpoint saved
EXIT_FAILED = 4  # exit code of a sweep with a trial that failed, and of `plan --measure` if no layout trains

_YAML = (".yaml", ".yml")  # endings of config files


class StepOrLabel(click.ParamType[int | str]):
    """Step or label of a checkpoint."""

    name = "step|label"

    def convert(self, value: int | str, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return a step as a number, any other text as a label. Fails for negative numbers."""
        if str(value).removeprefix("-").isdigit():
            if (step := int(value)) < 0:
                self.fail(f"{step} is negative", param, ctx)
            return step
        return value


class IntOrAuto(click.ParamType[int | str]):
    """A number of at least 1, or auto."""

    name = "n|auto"

    def convert(self, value: int | str, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number, or "auto". Fails for anything else."""
        return value if value == "auto" else int(click.IntRange(min=1).convert(value, param, ctx))  # type: ignore[arg-type]


WEIGHTS = click.Choice(["averaged", "trained"])
POSITIVE_FLOAT = click.FloatRange(min=0, min_open=True)


class ConfigWord(click.ParamType[str]):
    """A config file, a recipe, or a `key=value` word. The shell completes files, names, keys and literal values."""

    name = "word"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the completions of an incomplete word."""
        from raytrain_hpc.cli.completion import complete_config_word

        return complete_config_word(ctx.params.get(param.name or "") or (), incomplete)


class KeyOrSection(ConfigWord):
    """A key or a section; with --print, a word as of `train`."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the completions of an incomplete name."""
        from raytrain_hpc.cli.completion import complete_name

        return (
            super().shell_complete(ctx, param, incomplete) if ctx.params["print_words"] else complete_name(incomplete)
        )


class RecipeName(click.ParamType[str]):
    """The name of a recipe."""

    name = "recipe"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the recipes whose names begin with `incomplete`."""
        from raytrain_hpc.config.recipes import list_recipes

        return [CompletionItem(name) for name in list_recipes() if name.startswith(incomplete)]


CONFIG_WORDS, KEY_OR_SECTION, RECIPE = ConfigWord(), KeyOrSection(), RecipeName()


class ConfigCommand(click.Command):
    """Command with settings as words. An option such as `--steps 10` is refused with the word to write instead."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Exit with code 2 and one line if an option does not exist."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            click.echo(f"error: {error.option_name}: {_suggest_word(self, error.option_name, given)}", err=True)
            sys.exit(2)


def _suggest_word(command: click.Command, option: str, args: list[str]) -> str:
    """Return the remedy for an option that does not exist: `train.steps=10` for `--steps 10`."""
    import difflib

    from raytrain_hpc.config.aliases import find_setting

    known = [name for param in command.params for name in param.opts if name.startswith("--")]
    similar = difflib.get_close_matches(option, known, n=1, cutoff=0.8)
    if similar:
        return f"no such option; did you mean {similar[0]}?"
    setting = find_setting(option.lstrip("-").replace("-", "_"))
    if not setting:
        return "no such option; settings are key=value words, and `raytrain-hpc config` lists all keys"
    key, _, explanation = setting.partition(" ")
    if "=" not in key:
        key = f"{key}={_find_option_value(option, args)}"
    return f"settings are key=value words; write {f'{key} {explanation}'.rstrip()}"


def _find_option_value(option: str, args: list[str]) -> str:
    """Return the value that `--option VALUE` or `--option=VALUE` gives in `args`, or "VALUE" if there is none."""
    for word, following in zip(args, [*args[1:], "-"], strict=True):
        name, _, value = word.partition("=")
        if name == option:
            return value or ("VALUE" if following.startswith("-") else following)
    return "VALUE"


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

    A word with `=` that ends as a YAML file does, and is one, is the config: sweeps name directories by their settings.

    Raises:
        ConfigError: More than one config file is named, or a key has no value.
    """
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word in get_fields() and not Path(word).exists():
            value = following if following and "=" not in following else "VALUE"
            raise ConfigError(word, "", "command line", f"has no value; write {word}={value}")
    files = [word for word in words if "=" not in word or (Path(word).suffix in _YAML and Path(word).is_file())]
    if len(files) > 1:
        raise ConfigError(
            "config", files[1], "command line", f"one config file at a time; remove this one or {files[0]}"
        )
    return (files[0] if files else None), [word for word in words if word not in files]
