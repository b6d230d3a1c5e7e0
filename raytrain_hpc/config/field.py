"""Declaration of a setting: default, description and bounds; and the base class of all sections."""

from __future__ import annotations

import difflib
import re
from copy import copy
from dataclasses import field
from typing import Any, ClassVar, Literal

from raytrain_hpc.errors import ConfigError

AUTO = "auto"
Auto = Literal["auto"]


def key(default: Any, doc: str, *, minimum: float | None = None, above: float | None = None) -> Any:
    """Declare a documented dataclass field. The lower bounds are `minimum` (inclusive) and `above` (exclusive).

    `validate_config` checks the bounds. A field whose name is a Python keyword ends in an underscore; its key does not.
    """
    metadata = {"doc": doc, "minimum": minimum, "above": above}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Section:
    """Base class of the sections of a config. Assigning an attribute that is not a key raises ConfigError."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # every subclass is a dataclass
    shorthand: ClassVar[str] = ""
    """In a list of sections, text stands for a section with only this key; "": it does not."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            section = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__.removesuffix("Config")).lower()
            remedy = f"no such key; {suggest_name(name, list(self.__dataclass_fields__))}"
            raise ConfigError(f"{section}.{name}".lstrip("."), value, "", remedy)
        super().__setattr__(name, value)


def suggest_name(name: str, names: list[str]) -> str:
    """Return "did you mean NAME?" with the most similar of `names`, or a list of them all if none is similar."""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {matches[0]}?" if matches else f"known: {', '.join(names)}"
