"""JSON schema of config files, with which editors complete and check keys and values."""

from __future__ import annotations

from typing import Any

from raytrain_hpc.config.schema import PLANNABLE_KEYS, SECTIONS, get_default, get_fields, to_dict
from raytrain_hpc.config.value_types import get_type, make_json_schema

_REFERENCE = {"type": "string", "pattern": r"\$\{"}  # ${section.key}, resolved when the file is loaded


def make_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a config file: sections, keys, types, defaults and descriptions."""
    properties: dict[str, Any] = {"base": {"type": "string", "description": "YAML file that is loaded first."}}
    for name, section in SECTIONS.items():
        properties[name] = {
            "type": ["object", "null"],
            "description": (section.__doc__ or "").strip().splitlines()[0],
            "additionalProperties": False,
            "properties": {
                key.partition(".")[2]: _make_key_schema(key) for key in get_fields() if key.startswith(f"{name}.")
            },
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "raytrain_hpc configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _make_key_schema(key: str) -> dict[str, Any]:
    field = get_fields()[key]
    value = make_json_schema(get_type(key))
    for name, bound in (("minimum", "minimum"), ("above", "exclusiveMinimum")):
        if field.metadata[name] is not None:
            _add_bound(value, bound, field.metadata[name])
    options = value.pop("anyOf", [value])
    if key in PLANNABLE_KEYS:
        options = [*options, {"const": "auto"}, {"type": "array", "items": options[0], "minItems": 1}]
    if {"type": "string"} not in options:
        options = [*options, _REFERENCE]
    return {"description": field.metadata["doc"], "default": to_dict(get_default(key)), "anyOf": options}


def _add_bound(schema: dict[str, Any], name: str, bound: float) -> None:
    """Add a bound to the number types of a schema."""
    for option in schema.get("anyOf", [schema]):
        if option.get("type") in ("integer", "number"):
            option[name] = bound
