"""Declaration of a setting: default, description and lower bound."""

from __future__ import annotations

from dataclasses import field
from typing import Any

AUTO = "auto"


def key(default: Any, doc: str, *, minimum: float | None = None, above: float | None = None) -> Any:
    """Declare a documented dataclass field. The lower bounds are `minimum` (inclusive) and `above` (exclusive).

    `load_config` checks the bounds.
    """
    metadata = {"doc": doc, "minimum": minimum, "above": above}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)
