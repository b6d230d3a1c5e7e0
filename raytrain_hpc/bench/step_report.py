"""Reports of the peers of `bench recovery`: one line per step, the pid of each rank, and an injected exception."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO

STEPS_FILE, INJECTION_FILE, RAISED_FILE, GROW_FILE = "steps.jsonl", "exception.json", "exception.raised", "grow"


class StepReport:
    """Writer of the steps of one rank.

    The rank that reports appends a line per step to DIRECTORY/steps.jsonl, with the Unix time of its end, the mean loss
    of its rows and the number of the process group. Every rank writes its pid to DIRECTORY/RANK.pid.
    """

    def __init__(self, directory: Path, rank: int, *, reports: bool):
        """Write the pid. `reports`: whether this rank writes the steps."""
        self._directory, self._rank = directory, rank
        (directory / f"{rank}.pid").write_text(str(os.getpid()))
        self._file: IO[str] | None = (directory / STEPS_FILE).open("a") if reports else None

    def record(self, step: int, loss: float, generation: int = 0, world_size: int = 0) -> None:
        """Record that `step` steps are complete, the last one on `world_size` ranks.

        `generation`: number of process groups formed before this one.
        """
        if self._file is not None:
            line = {"step": step, "time/unix": time.time(), "train/loss": loss, "elastic/generation": generation}
            print(json.dumps(line | {"elastic/world_size": world_size}), file=self._file, flush=True)

    def raise_if_injected(self, step: int) -> None:
        """Raise ArithmeticError, once per run, if `request_exception` named this rank and this number of steps."""
        request = self._directory / INJECTION_FILE
        if not request.exists() or json.loads(request.read_text()) != {"rank": self._rank, "step": step}:
            return
        try:
            (self._directory / RAISED_FILE).touch(exist_ok=False)
        except FileExistsError:
            return
        raise ArithmeticError("injected")


def request_exception(directory: Path, rank: int, step: int) -> None:
    """Make a rank of a run in `directory` raise an exception when `step` steps are complete. Call before its start."""
    (directory / INJECTION_FILE).write_text(json.dumps({"rank": rank, "step": step}))
