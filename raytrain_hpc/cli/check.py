"""The result of a check of `doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Fact = Mapping[str, Any]  # about one worker: its placement and `worker.host_info`
CheckState = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """Result of one check: its state, the finding, and a remedy if the state is not ok."""

    name: str
    state: CheckState
    found: str
    remedy: str = ""

    def format_line(self) -> str:
        """Return the line of a report for the terminal."""
        return f"{self.state:<5} {self.name:<12} {self.found}" + (f" -> {self.remedy}" if self.remedy else "")
