"""The text forms of run.deadline, as words and in a YAML file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from raytrain_hpc.config.deadline_text import parse_deadline
from raytrain_hpc.config.loader import config_to_yaml, load_config
from raytrain_hpc.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h30m", 12600), ("90m", 5400), ("1d12h", 129600), ("45s", 45), ("5400", 5400), ("0.5", 0.5), ("1.5h", 5400)],
)
def test_duration_counts_from_the_start(text: str, seconds: float) -> None:
    assert parse_deadline(text, 1000.0) == 1000.0 + seconds


def test_time_is_absolute() -> None:
    with_offset = datetime(2026, 12, 31, 16, 0, tzinfo=UTC).timestamp()
    assert parse_deadline("2026-12-31T18:00+02:00", 5.0) == with_offset
    assert parse_deadline("2026-12-31 18:00:30", 5.0) == datetime(2026, 12, 31, 18, 0, 30).timestamp()  # local
    assert parse_deadline("none", 5.0) is None


@pytest.mark.parametrize("text", ["3h30", "soon", "12:00:00", "1w", "-5", "0", "0m", "h", "", "2026-13-01", "3h 30m"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^run.deadline='.*' \(load_config\): needs a (duration|time)"):
        load_config(None, [f"run.deadline={text}"])


@pytest.mark.parametrize("text", ["2026-12-31T18:00:00", "1:30", "5400", "2026-12-31", "none", "auto", "2h"])
def test_yaml_keeps_the_text(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"run:\n  deadline: {text}\n")
    if text == "1:30":  # a number in base 60 to YAML 1.1
        with pytest.raises(ConfigError, match=f"run.deadline='1:30' \\({path}:2\\): needs a duration"):
            load_config(path)
        return
    config = load_config(path)
    assert config.run.deadline == text
    path.write_text(config_to_yaml(config))
    assert load_config(path).run.deadline == text
