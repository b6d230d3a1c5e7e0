"""The list of cases that the ordinary run leaves out names tests that exist, and leaves out no test completely."""

from __future__ import annotations

import pytest

from tests.conftest import COLLECTED
from tests.extended_cases import EXTENDED_CASES, EXTENDED_TESTS, is_extended, list_unused


def test_every_pattern_matches_a_test(request: pytest.FixtureRequest) -> None:
    collected = request.config.stash[COLLECTED]
    files = {file for file, _ in collected}
    assert [line for line in list_unused(collected) if line.split(":")[0] in files] == []


def test_some_case_of_every_test_always_runs(request: pytest.FixtureRequest) -> None:
    """The exceptions are listed with what shows the same."""
    collected = request.config.stash[COLLECTED]
    functions = {(file, name.split("[")[0]) for file, name in collected}
    kept = {(file, name.split("[")[0]) for file, name in collected if not is_extended(file, name)}
    assert sorted(functions - kept - set(EXTENDED_TESTS)) == [] and kept.isdisjoint(EXTENDED_TESTS)
    files = {file for file, _ in functions}
    assert [test for test in EXTENDED_TESTS if test[0] in files and test not in functions] == []


def test_an_unused_pattern_is_found() -> None:
    tests = [(file, pattern) for file, patterns in EXTENDED_CASES.items() for pattern in patterns]
    assert len(list_unused(tests[:1])) >= len(tests) - len(EXTENDED_CASES[tests[0][0]])
