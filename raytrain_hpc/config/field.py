"""How a setting is declared: its default, what it means, and the least that it may be."""

from __future__ import annotations

from dataclasses import field
from typing import Any

AUTO = "auto"


def key(default: Any, doc: str, *, minimum: float | None = None, above: float | None = None) -> Any:
    """A documented setting. `minimum` is inclusive, `above` exclusive; both are checked when the config is loaded."""
    metadata = {"doc": doc, "minimum": minimum, "above": above}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
