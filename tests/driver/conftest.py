"""What tests of whole runs share: a process to fork lives from, and the run that nothing disturbs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.driver.cli_process import WORDS, Lives, joined


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    made = Lives()
    yield made
    made.close()


@pytest.fixture(scope="session")
def undisturbed(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of every step of the run of WORDS."""
    directory = tmp_path_factory.mktemp("undisturbed")
    code, said = lives.run(directory / "out", "train", *WORDS, f"run.dir={directory}/run")
    assert code == 0, said
    return joined(directory / "run")
