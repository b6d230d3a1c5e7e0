"""Table of benchmark results, printed as Markdown or JSON."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.worker.host_info import get_package_version

Value = str | int | float | bool | None | list[float]


def describe_machine() -> str:
    """Describe the machine and the package versions. Benchmarks of one device run without Ray."""
    packages = " ".join(f"{name} {get_package_version(name)}" for name in ("torch", "ray", "pyarrow", "numpy"))
    return f"{count_usable_cpus()} CPU cores, {platform.machine()}, Python {platform.python_version()}, {packages}"


@dataclass
class Table:
    """Rows with the same columns, and notes on how they were measured. Missed goals are shown too."""

    title: str
    columns: tuple[str, ...]
    rows: list[dict[str, Value]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_row(self, *values: Value) -> None:
        """Add a row with one value per column, in the order of the columns.

        Raises:
            ValueError: The number of values is not the number of columns.
        """
        self.rows.append(dict(zip(self.columns, values, strict=True)))

    def to_markdown(self) -> str:
        """Format the table as Markdown with aligned columns, readable on a terminal too."""
        cells = [list(self.columns), *([_format_cell(row[name]) for name in self.columns] for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        lines = [_format_row(line, widths) for line in cells]
        lines.insert(1, _format_row(["-" * width for width in widths], widths))
        return "\n".join([self.title, "", *lines, "", *(f"- {note}" for note in [*self.notes, describe_machine()])])

    def to_json(self) -> dict[str, Any]:
        """Return title, machine, rows as dicts with unrounded values, and notes."""
        return {"title": self.title, "machine": describe_machine(), "rows": self.rows, "notes": self.notes}


def _format_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _format_cell(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(_format_cell(item) for item in value)
    if isinstance(value, float) and 0 < abs(value) < 0.0005:
        return f"{value:.1e}"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
    return str(value)
