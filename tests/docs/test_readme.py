"""README.md stays short and in order, and what it states agrees with the measurements, the recipes and the commands."""

from __future__ import annotations

import re
from itertools import takewhile

import pytest

from raytrain_hpc.config.recipes import list_recipes
from tests.docs.documents import PROGRAM, ROOT, find_code_spans
from tests.docs.test_commands import check_command

TEXT = (ROOT / "README.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))


def test_readme_is_short_and_in_order() -> None:
    assert len(TEXT.splitlines()) <= 150
    assert list(SECTIONS) == [
        "Proof",
        "Quick start",
        "Why, and when not",
        "Compared with other trainers",
        "Features",
        "Use it from",
        "Recipes",
        "Documentation",
        "Status and limits",
        "Tests",
        "License and citation",
    ]


def read_rows(text: str, first_header: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with this cell, the header among them."""
    lines = takewhile(lambda line: line.startswith("|"), text[text.index(f"| {first_header} |") :].splitlines())
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def test_recovery_times_are_those_of_the_measurements() -> None:
    results = (ROOT / "benchmarks/RESULTS.md").read_text().partition("\n## Recovery from")[2].partition("\n## ")[0]
    header, _, *rows = read_rows(results, "system")
    cells_of_system = {row[0].partition(" (")[0]: dict(zip(header, row, strict=True)) for row in rows}
    systems, _, *shown = read_rows(SECTIONS["Proof"], "fault")
    compared = 0
    for fault, *cells in shown[:3]:
        for system, cell in zip(systems[1:], cells, strict=True):
            name = "platform" if system == "raytrain_hpc" else system
            value = cells_of_system[name][fault.removesuffix(" of a rank").removeprefix("a Python ")]
            seconds, _, steps = cell.replace(" s", "", 1).partition(", ")
            exact, _, exact_steps = value.partition(", ")
            assert steps == exact_steps, (system, fault)
            if exact.startswith("more than"):
                assert seconds == exact
            else:
                digits = len(seconds.partition(".")[2])
                assert float(seconds) == pytest.approx(float(exact), abs=0.5001 * 10**-digits), (system, fault)
            compared += 1
    assert compared == 18


def test_recipes_are_installed() -> None:
    named = set(find_code_spans(SECTIONS["Recipes"].partition(" are installed")[0]))
    assert len(named) > 5
    assert named <= set(list_recipes())


COMMANDS = [span for span in find_code_spans(SECTIONS["Use it from"]) if PROGRAM in span or "cluster/" in span]


@pytest.mark.parametrize("command", [command for command in COMMANDS if "SCRIPT" not in command])
def test_commands_of_the_table_of_platforms(command: str) -> None:
    check_command(command)
