"""Where metrics go: metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any


class JsonlSink:
    """One JSON line a step, floats in full precision, each line written whole."""

    def __init__(self, path: Path):
        # A kill can leave a line without its end: start on a new one.
        torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
        self._file: IO[str] = path.open("a")
        if torn:
            self._file.write("\n")

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one step."""
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Make everything written so far survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()


class TensorBoardSink:
    """Scalars under the same keys. A resumed run overwrites the steps it runs again (purge_step)."""

    def __init__(self, directory: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, not needed by everyone

        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1)  # type: ignore[no-untyped-call]

    def write(self, metrics: dict[str, Any]) -> None:
        """Add one step."""
        for key, value in metrics.items():
            if "/" in key and value is not None:
                self._writer.add_scalar(key, value, metrics["step"])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()  # type: ignore[no-untyped-call]
