"""Conversion of values to the declared types of keys, and the description of those types."""

from __future__ import annotations

import types
from collections.abc import Mapping
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from raytrain_hpc.config.field import Section, suggest_name
from raytrain_hpc.config.schema import (
    PLANNABLE_KEYS,
    SECTIONS,
    CallbackConfig,
    InjectConfig,
    SourceConfig,
    StageConfig,
    get_fields,
)
from raytrain_hpc.config.training_config import ParameterGroupConfig

_ITEM_EXAMPLES: dict[Any, str] = {
    int: "[0, 1]",
    float: "[1, 0.5]",
    str: "[qkv, out]",
    SourceConfig: "[{path: DIR, weight: 1}]",
    InjectConfig: "[{kind: kill, rank: 1, step: 10}]",
    CallbackConfig: "[{name: ema, args: {decay: 0.999}}]",
    ParameterGroupConfig: '[{pattern: "*.norm*", weight_decay: 0}]',
    StageConfig: "[{from_tokens: 1000000, weights: [1, 3]}]",
}
_UNIONS = (Union, types.UnionType)
_SCALARS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_JSON_SCALARS: dict[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}


def get_type(key: str) -> Any:
    """Return the declared type of a key, such as `int` or `Literal["auto", "never"]`."""
    return _get_types()[key]


@cache
def _get_types() -> dict[str, Any]:
    hints = {name: get_type_hints(section) for name, section in SECTIONS.items()}
    return {key: hints[key.partition(".")[0]][field.name] for key, field in get_fields().items()}


def convert_value(value: Any, declared: Any) -> Any:
    """Return `value`, as YAML or Python gives it, converted to a declared type.

    Whole numbers are accepted for fractions, numbers in scientific notation that YAML reads as text (1e9) as numbers,
    and mappings for the dataclasses of lists. A bool is never a number. Raises ValueError with what is needed instead.
    """
    origin = get_origin(declared)
    if declared in (int, float):
        return _convert_number(value, declared)
    if origin in _UNIONS:
        return _convert_union(value, declared)
    if origin is list and isinstance(value, list | tuple):
        return [_convert_item(item, declared) for item in value]
    if origin is dict and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {str(name): _convert_plain(item) for name, item in value.items()}
    if origin is Literal and any(value == word and type(value) is type(word) for word in get_args(declared)):
        return value
    if declared is str and isinstance(value, Path):
        return str(value)
    if origin is None and type(value) is declared:
        return value
    raise ValueError(f"needs {describe_type(declared)}")


def _convert_plain(value: Any) -> Any:
    """Return a value of a mapping as YAML would give it: a tuple as a list, a number of numpy as one of Python.

    It is otherwise not the value that a resumed run reads from its config.yaml. Raises ValueError for other objects.
    """
    for scalar in (bool, int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    if value is None or isinstance(value, date | bytes):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_convert_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {_convert_plain(name): _convert_plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):  # of numpy or torch
        return _convert_plain(value.tolist())
    raise ValueError(f"takes text, numbers, lists and mappings, not a {type(value).__name__}")


def _convert_number(value: Any, declared: Any) -> int | float:
    remedy = f"needs {describe_type(declared)}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(remedy)
    try:
        number = value if not isinstance(value, str) else int(value) if value.isdigit() else float(value)
        if declared is float:
            return float(number)
        if number != int(number):
            raise ValueError(remedy)
        return int(number)
    except (ValueError, OverflowError):
        raise ValueError(remedy) from None


def _convert_union(value: Any, declared: Any) -> Any:
    for member in get_args(declared):
        try:
            return convert_value(value, member)
        except ValueError:
            continue
    raise ValueError(f"needs {describe_type(declared)}")


def _convert_item(item: Any, declared: Any) -> Any:
    """Convert one item of a list; a mapping becomes the dataclass of the list."""
    (item_type,) = get_args(declared)
    if isinstance(item, Section) and type(item) is item_type:
        item = {name: getattr(item, name) for name in item.__dataclass_fields__}
    if isinstance(item, str) and (shorthand := getattr(item_type, "shorthand", "")):
        item = {shorthand: item}
    if not (isinstance(item, Mapping) and isinstance(item_type, type) and issubclass(item_type, Section)):
        try:
            return convert_value(item, item_type)
        except ValueError:
            raise ValueError(f"needs {describe_type(declared)}") from None
    hints, result = get_type_hints(item_type), {}
    for name, value in item.items():
        names = list(item_type.__dataclass_fields__)
        if name not in names:
            raise ValueError(f"needs {describe_type(declared)}; {name}: {suggest_name(str(name), names)}")
        try:
            result[name] = convert_value(value, hints[name])
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from None
    return item_type(**result)


def describe_type(declared: Any) -> str:
    """Return a description of a declared type for messages: "a whole number or auto", "one of none, cpu, disk"."""
    if declared in _SCALARS:
        return _SCALARS[declared]
    if get_origin(declared) is Literal:
        values = [str(value) for value in get_args(declared)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if get_origin(declared) in _UNIONS:
        words = [word for member in get_args(declared) for word in _split_description(member)]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    if get_origin(declared) is list:
        (item,) = get_args(declared)
        return f"a list like {_ITEM_EXAMPLES[item]}"
    if get_origin(declared) is dict:
        return "a mapping like {decay: 0.999}"
    return f"a {declared.__name__}"


def _split_description(declared: Any) -> list[str]:
    return list_literals(declared) or [describe_type(declared)]


def format_value(value: Any) -> str:
    """Return a value as written in YAML on one line: `true`, `0.003`, `[0, 1]`, and "" for empty text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(format_value(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {format_value(item)}' for name, item in value.items())}}}"
    if isinstance(value, Section):
        names = value.__dataclass_fields__
        return f"{{{', '.join(f'{name}: {format_value(getattr(value, name))}' for name in names)}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def list_literals(declared: Any) -> list[str]:
    """Return the words that a declared type accepts, as written in YAML: "auto", "true", "zbv"; empty for text."""
    if declared is bool:
        return ["true", "false"]
    if get_origin(declared) is Literal:
        return [str(value) for value in get_args(declared)]
    if get_origin(declared) in _UNIONS:
        return [word for member in get_args(declared) for word in list_literals(member)]
    return []


def describe_key_type(key: str) -> str:
    """Return a description of the values of a key; includes `auto` and lists where the planner can choose it."""
    description = describe_type(get_type(key)).removeprefix("one of ")
    if key not in PLANNABLE_KEYS:
        return description
    return f"{description}; or {'' if 'auto' in list_literals(get_type(key)) else 'auto or '}a list to choose from"


def make_json_schema(declared: Any) -> dict[str, Any]:
    """Return the JSON schema of a declared type."""
    if declared in _JSON_SCALARS:
        return {"type": _JSON_SCALARS[declared]}
    if get_origin(declared) is Literal:
        return {"enum": list(get_args(declared))}
    if get_origin(declared) in _UNIONS:
        return {"anyOf": [make_json_schema(member) for member in get_args(declared)]}
    if get_origin(declared) is list:
        return {"type": "array", "items": make_json_schema(get_args(declared)[0])}
    if get_origin(declared) is dict:
        return {"type": "object"}
    hints = get_type_hints(declared)
    properties = {name: make_json_schema(hints[name]) for name in declared.__dataclass_fields__}
    section = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"anyOf": [section, {"type": "string"}]} if declared.shorthand else section
