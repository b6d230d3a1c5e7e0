"""Search for a step in metrics.jsonl from its end, against a reader of the whole file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.driver import metrics_search
from raytrain_hpc.driver.run_directory import RunDirectory


def find_in_whole_file(path: Path, step: int) -> dict[str, Any] | None:
    found = None
    for line in path.read_text().split("\n"):
        try:
            metrics = json.loads(line)
        except ValueError:
            continue
        found = metrics if metrics["step"] == step else found
    return found


@pytest.mark.parametrize("block_bytes", [7, 64, 1000, 1 << 18])
def test_the_last_line_of_a_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Steps are repeated, kills leave pieces of lines anywhere, and other keys and values look like the step."""
    monkeypatch.setattr(metrics_search, "_BLOCK_BYTES", block_bytes)
    directory, draw = RunDirectory(tmp_path), random.Random(block_bytes)
    assert directory.read_step_metrics(3) is None, "there is no file"
    for number in range(12):
        content, step = "", 0
        for index in range(draw.randrange(1, 40)):
            step = max(0, step - draw.randrange(0, 12)) + 1 if draw.random() < 0.2 else step + 1
            line = {"index": index, "nested": {"step": draw.randrange(1, 30)}, "text": "é" * draw.randrange(3)}
            text = json.dumps(line | {"step": step}, ensure_ascii=False)
            content += text[: draw.randrange(len(text))] if draw.random() < 0.1 else text
            content += "\n" * (draw.random() < 0.95)
        directory.metrics.write_text(content)
        for step in range(45):
            assert directory.read_step_metrics(step) == find_in_whole_file(directory.metrics, step), (number, step)


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.metrics.open("w") as file:
        for step in range(1, 40_001):
            file.write(json.dumps({"step": step, "train/loss": 1 / step, "text": "x" * 400}) + "\n")

    def count_read_bytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count_read_bytes()
    metrics = directory.read_step_metrics(39_990)
    assert metrics is not None and metrics["train/loss"] == 1 / 39_990
    assert count_read_bytes() - before < directory.metrics.stat().st_size / 10
