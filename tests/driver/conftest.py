"""The curve of an undisturbed run, with which those of disturbed runs are compared."""

from __future__ import annotations

import pytest

from tests.driver.cli_process import WORDS, CliRunner, read_curve


@pytest.fixture(scope="session")
def reference_curve(cli: CliRunner, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float, float]]:
    """Return loss, gradient norm and learning rate of every step of an undisturbed run of WORDS."""
    directory = tmp_path_factory.mktemp("undisturbed")
    code, output = cli.run(directory / "out", "train", *WORDS, f"run.dir={directory}/run")
    assert code == 0, output
    return read_curve(directory / "run")
