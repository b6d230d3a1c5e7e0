"""Shell completion of config words: files, recipes, keys and literal values. Loads neither torch, Ray nor YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from raytrain_hpc.config.recipes import list_recipes
from raytrain_hpc.config.schema import PLANNABLE_KEYS, SECTIONS, get_fields
from raytrain_hpc.config.value_types import get_type, list_literals


class NoSpaceBashComplete(BashComplete):
    """Bash completion that adds no space after `key=`, so that the value can be typed or completed."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n", "    [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY == *= ]] && compopt -o nospace\n    return 0\n"
    )


def register_bash_completion() -> None:
    """Replace click's completion of bash. Call before click's main function handles a completion request."""
    add_completion_class(NoSpaceBashComplete, "bash")


def complete_config_word(previous: Sequence[str], incomplete: str) -> list[CompletionItem]:
    """Return the completions of a word of `[CONFIG] [key=value ...]`.

    `previous` are the words before it. Bash splits words at `=`: then the key, and `=` unless the value is empty, are
    previous words, and `incomplete` is the value.
    """
    words = [word for word in previous[-2:] if word != "="]
    if words and words[-1] in get_fields():
        key, value, prefix = words[-1], incomplete, ""
    else:
        key, equals, value = incomplete.partition("=")
        if not equals:
            return _complete_key_or_file(previous, incomplete)
        prefix = f"{key}="
    return [CompletionItem(prefix + word) for word in list_values(key) if word.startswith(value)]


def complete_name(incomplete: str) -> list[CompletionItem]:
    """Return the keys and sections that begin with `incomplete`."""
    return [CompletionItem(name) for name in (*SECTIONS, *get_fields()) if name.startswith(incomplete)]


def list_values(key: str) -> list[str]:
    """Return the words that a key accepts; empty for an unknown key, and for numbers and text."""
    if key not in get_fields():
        return []
    literals = list_literals(get_type(key))
    return [*literals, "auto"] if key in PLANNABLE_KEYS and "auto" not in literals else literals


def _complete_key_or_file(previous: Sequence[str], incomplete: str) -> list[CompletionItem]:
    keys = [f"{key}=" for key in get_fields() if key.startswith(incomplete)]
    files: list[str] = []
    if all("=" in word or word == "=" for word in previous):
        files = [name for name in list_recipes() if name.startswith(incomplete)]
        files += sorted(f"{path}/" if path.is_dir() else str(path) for path in _list_paths(incomplete))
    return [CompletionItem(word) for word in (*files, *keys)]


def _list_paths(incomplete: str) -> list[Path]:
    """Return the YAML files, and the directories once a path separator is typed, that begin with `incomplete`."""
    directory, _, name = incomplete.rpartition("/")
    parent = Path(directory or ("/" if incomplete.startswith("/") else "."))
    paths = [path for path in parent.glob(f"{name}*") if not path.name.startswith(".")] if parent.is_dir() else []
    return [path for path in paths if path.suffix in (".yaml", ".yml") or path.is_dir()]
