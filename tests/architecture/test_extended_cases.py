"""The list of cases that the ordinary run leaves out names tests that exist, and leaves out no test completely."""

from __future__ import annotations

import pytest

from tests.conftest import COLLECTED
from tests.extended_cases import EXTENDED_CASES, is_extended, list_unused


def test_every_pattern_matches_a_test(request: pytest.FixtureRequest) -> None:
    collected = request.config.stash[COLLECTED]
    files = {file for file, _ in collected}
    assert [line for line in list_unused(collected) if line.split(":")[0] in files] == []


def test_some_case_of_every_test_always_runs(request: pytest.FixtureRequest) -> None:
    collected = [(file, name) for file, name in request.config.stash[COLLECTED] if file in EXTENDED_CASES]
    functions = {(file, name.split("[")[0]) for file, name in collected}
    kept = {(file, name.split("[")[0]) for file, name in collected if not is_extended(file, name)}
    assert functions == kept


def test_an_unused_pattern_is_found() -> None:
    tests = [(file, pattern) for file, patterns in EXTENDED_CASES.items() for pattern in patterns]
    assert len(list_unused(tests[:1])) >= len(tests) - len(EXTENDED_CASES[tests[0][0]])
