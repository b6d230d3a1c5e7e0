"""Search in metrics.jsonl from its end: of a long run, only its last lines are read."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_BLOCK_BYTES = 1 << 18


def find_last_line_of_step(path: Path, step: int) -> dict[str, Any] | None:
    """Return the last line of `step`, without lines that a kill left incomplete; None if there is none, or no file.

    Steps that were run again are anywhere: no other step tells that the line does not come before.
    """
    if not path.exists():
        return None
    pattern = re.compile(rb'"step"\s*:\s*%d(?!\d)' % step)  # far faster than to parse all lines
    with path.open("rb") as file:
        for block in _read_backward(file):
            if pattern.search(block) is None:
                continue
            for line in reversed(block.split(b"\n")):
                if pattern.search(line) is not None and (metrics := _parse(line)).get("step") == step:
                    return metrics
    return None


def _read_backward(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file in blocks of whole lines, the last one first."""
    position, rest = file.seek(0, io.SEEK_END), b""
    while position > 0:
        size = min(_BLOCK_BYTES, position)
        position = file.seek(position - size)
        block = file.read(size) + rest
        start = 0 if position == 0 else block.find(b"\n") + 1 or len(block)  # the first line begins in an earlier block
        rest = block[:start]
        yield block[start:]


def _parse(line: bytes) -> dict[str, Any]:
    """Return the content of a line, {} if it is incomplete."""
    try:
        metrics = json.loads(line.decode(errors="replace"))
    except json.JSONDecodeError:
        return {}
    return metrics if isinstance(metrics, dict) else {}
