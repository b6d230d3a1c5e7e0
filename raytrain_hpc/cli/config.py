"""`raytrain-hpc config`: list and explain the configuration keys, and print a resolved configuration."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator

import click

from raytrain_hpc.cli.options import KEY_OR_SECTION, ConfigCommand, print_errors_on_one_line, split_words
from raytrain_hpc.config.aliases import FORMER_KEYS, suggest_key
from raytrain_hpc.config.fixed_settings import get_rule
from raytrain_hpc.config.schema import SECTIONS, get_default, get_fields
from raytrain_hpc.config.value_types import describe_key_type, format_value
from raytrain_hpc.errors import ConfigError


@click.command(cls=ConfigCommand)
@click.argument("names", nargs=-1, metavar="[KEY|SECTION ...]", type=KEY_OR_SECTION)
@click.option("--print", "print_words", is_flag=True, help="Print the resolved settings of [CONFIG] [key=value ...].")
@click.option("--schema", is_flag=True, help="Print the JSON schema of config files, for editors.")
@print_errors_on_one_line
def config(names: tuple[str, ...], print_words: bool, schema: bool) -> None:
    """Print the configuration keys with type, default and description: all, or those of a section, or one key.

    With --print, the arguments are those of `train`, and every setting is printed with its value and its origin.
    """
    if schema:
        from raytrain_hpc.config.json_schema import make_schema

        click.echo(json.dumps(make_schema(), indent=2))
        return
    for line in _format_resolved(names) if print_words else _format_keys(names):
        click.echo(line)


def _format_resolved(words: tuple[str, ...]) -> Iterator[str]:
    """Yield `key=value  # origin` for every key of a loaded config."""
    from raytrain_hpc.config.loader import load_command_line

    loaded = load_command_line(*split_words(words))
    choices = loaded.auto_choices
    for key, field in get_fields().items():
        value = getattr(getattr(loaded, key.partition(".")[0]), field.name)
        text = format_value(value) if key not in choices else "auto" if choices[key] is None else f"{choices[key]}"
        yield f"{f'{key}={text}':<56}  # {loaded.origin(key) or 'default'}"


def _format_keys(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the description of keys and sections. Raises ConfigError for a name that is neither."""
    fields = get_fields()
    for name in names:
        if name not in fields and name not in SECTIONS:
            raise ConfigError("config", name, "command line", f"no such key or section; {suggest_key(name)}")
    if not names:
        yield f"{len(fields)} keys in {len(SECTIONS)} sections. Set them as key=value words or in a YAML file."
    for section, section_class in SECTIONS.items():
        keys = [key for key in fields if key.startswith(f"{section}.")]
        if not names or section in names:
            yield f"\n{section}: {_get_first_line(section_class.__doc__)}\n"
            for key in keys:
                yield from _format_key(key)
        else:
            for key in keys:
                if key in names:
                    yield from _format_key(key)
                    yield from _format_details(key)


def _format_key(key: str) -> Iterator[str]:
    field = get_fields()[key]
    yield f"  {key}={format_value(get_default(key))}  ({describe_key_type(key)})"
    width = min(110, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(field.metadata["doc"], width - 6, break_on_hyphens=False)
    yield from (f"      {line}" for line in lines)


def _format_details(key: str) -> Iterator[str]:
    """Yield the bounds of a key, whether a run keeps it, and its former name."""
    metadata = get_fields()[key].metadata
    if metadata["minimum"] is not None:
        yield f"      At least {metadata['minimum']:g}."
    if metadata["above"] is not None:
        yield f"      More than {metadata['above']:g}."
    if get_rule(key) != "changeable":
        yield "      Fixed once the run has a checkpoint."
    former = [old for old, new in FORMER_KEYS.items() if new == key]
    if former:
        yield f"      Formerly {', '.join(former)}."


def _get_first_line(doc: str | None) -> str:
    return (doc or "").strip().splitlines()[0]
