"""Settings read from YAML files, with the file and line of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from raytrain_hpc.config.schema import SECTIONS, get_fields
from raytrain_hpc.errors import ConfigError

# Keys that take text, so that YAML's numbers and dates are not converted: 2026_11_21 is a name.
TEXT_KEYS = frozenset(key for key, field in get_fields().items() if field.type == "str")
_MAPPING_TAG = "tag:yaml.org,2002:map"
_NULL_TAG = "tag:yaml.org,2002:null"


class Setting(NamedTuple):
    """A key with its value, and where it was set."""

    key: str
    value: Any
    origin: str


def read_yaml_file(path: Path, name: str = "", including: tuple[Path, ...] = ()) -> Iterator[Setting]:
    """Yield the settings of a YAML file, those of its `base:` file first.

    `name` stands for the path in origins. Raises ConfigError for an unreadable file, invalid YAML, a key that is given
    twice, and base files that refer to each other (`including` are the files that this one was reached from).
    """
    name = name or str(path)
    if path.resolve() in including:
        raise ConfigError("base", str(path), str(including[-1]), "base files refer to each other; break the circle")
    try:
        root = yaml.compose(path.read_text())
    except OSError as error:
        raise ConfigError("config", name, "", f"cannot be read: {error.strerror}; check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("config", name, "", f"not valid YAML: {_describe_yaml_error(error)}") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("config", name, "", "must be a YAML mapping of sections")
    _check_duplicates(root, "", name)
    settings = list(_flatten(root, "", name))
    for setting in settings:
        if setting.key == "base":
            yield from read_yaml_file(path.parent / str(setting.value), "", (*including, path.resolve()))
    yield from (setting for setting in settings if setting.key != "base")


def check_text(key: str, text: str, origin: str) -> None:
    """Raise ConfigError if a text key is set to true or false, as in `logging.wandb_project=true`."""
    if text.lower() in ("true", "false"):
        raise ConfigError(key, text, origin, "needs text, such as a name; leave the key out to turn it off")


def _describe_yaml_error(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    location = "" if mark is None else f"line {mark.line + 1}: "
    return location + " ".join(str(getattr(error, "problem", None) or error).split())


def _check_duplicates(node: yaml.Node, prefix: str, name: str) -> None:
    """Raise ConfigError if a mapping, at any depth, has a key twice. The message has both lines."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_duplicates(item, prefix, name)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        dotted, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
        if dotted in lines:
            remedy = f"is given twice, in lines {lines[dotted]} and {line}; keep one of them"
            value = value_node.value if isinstance(value_node, yaml.ScalarNode) else "..."
            raise ConfigError(dotted, value, f"{name}:{line}", remedy)
        lines[dotted] = line
        _check_duplicates(value_node, f"{dotted}.", name)


def _flatten(node: yaml.MappingNode, prefix: str, name: str) -> Iterator[Setting]:
    for key_node, value_node in node.value:
        dotted = f"{prefix}{key_node.value}"
        origin = f"{name}:{key_node.start_mark.line + 1}"
        if not prefix and isinstance(value_node, yaml.MappingNode) and value_node.tag == _MAPPING_TAG:
            yield from _flatten(value_node, f"{dotted}.", name)  # also of unknown sections: their keys get suggestions
        elif dotted in SECTIONS and value_node.tag == _NULL_TAG:
            continue
        elif dotted in TEXT_KEYS and value_node.tag.rpartition(":")[2] in ("int", "float", "bool", "timestamp"):
            check_text(dotted, value_node.value, origin)
            yield Setting(dotted, value_node.value, origin)
        else:
            try:
                value = yaml.SafeLoader("").construct_object(value_node, deep=True)
            except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
                raise ConfigError(dotted, value_node.value, origin, "not a plain YAML value; quote it") from error
            yield Setting(dotted, value, origin)
