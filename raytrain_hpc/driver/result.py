"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """Content of result.json. `outcome` is "done" or "stopped" (saved; the same command resumes)."""

    outcome: str
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    steps: int
    tokens: int
    wall_s: float
    goodput: float
    restarts: int
    layout: dict[str, Any]
    checkpoint: str | None
    run_dir: str
    startup: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return the content under the keys of result.json."""
        plain = {**self.__dict__}
        plain["train/loss"] = plain.pop("train_loss")
        plain["val/loss"] = plain.pop("val_loss")
        return plain

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Result:
        """Return the result with the content of a result.json. Raises TypeError if a key is missing or unknown."""
        return cls(**{key.replace("/", "_"): value for key, value in content.items()})
