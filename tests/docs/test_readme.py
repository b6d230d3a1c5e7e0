"""README.md stays short and in order, and what it states agrees with the measurements, the recipes and the commands."""

from __future__ import annotations

import re

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


def test_recovery_times_are_those_of_the_measurements() -> None:
    results = (ROOT / "benchmarks/RESULTS.md").read_text().partition("\n## Recovery from")[2].partition("\n## ")[0]
    measured = re.findall(r"^\| (SIG\w+) \| (.*) \|$", results, re.MULTILINE)
    shown = re.findall(r"^\| (SIG\w+) of a rank \| (.*) \|$", SECTIONS["Proof"], re.MULTILINE)
    assert len(measured) == 2
    assert [(fault, re.sub(r"(?<=\d) s\b", "", row)) for fault, row in shown] == measured


def test_recipes_are_installed() -> None:
    named = set(find_code_spans(SECTIONS["Recipes"].partition(" are installed")[0]))
    assert len(named) > 5
    assert named <= set(list_recipes())


COMMANDS = [span for span in find_code_spans(SECTIONS["Use it from"]) if PROGRAM in span or "cluster/" in span]


@pytest.mark.parametrize("command", [command for command in COMMANDS if "SCRIPT" not in command])
def test_commands_of_the_table_of_platforms(command: str) -> None:
    check_command(command)
