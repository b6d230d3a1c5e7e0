"""A stand-in for the process of a trial that takes milliseconds: losses are a formula, and the files those of a run.

The loss of step s is (log10(optimizer.lr) + 3)^2 + 1 / s. A run resumes, ends with exit code 3 when its standard input
is closed, and fails if the learning rate is above 0.5. FAKE_STEP_S: seconds per step; FAKE_STARTS: trials that have
been started before one ends. `starts` in the run directory has the first step of each start, and `times` its begin and
end.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Plain:
    """An object of the package, without the time that importing its class takes."""

    def __new__(cls, *values: Any) -> Plain:
        return object.__new__(cls)


class Unpickler(pickle.Unpickler):
    """Reads a request of the sweep."""

    def find_class(self, module: str, name: str) -> Any:
        return Plain if module.startswith("raytrain_hpc") else super().find_class(module, name)


def main() -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    config = Unpickler(sys.stdin.buffer).load().config

    def wait_for_end() -> None:
        os.read(0, 1)
        stopped.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    run_dir, steps = Path(config.run.dir), config.train.steps
    began = time.time()
    (run_dir / "config.yaml").write_text(f"run: {{name: '{config.run.name}'}}\ntrain: {{steps: {steps}}}\n")
    metrics = run_dir / "metrics.jsonl"
    first = len(metrics.read_text().splitlines()) + 1 if metrics.exists() else 1
    with (run_dir / "starts").open("a") as starts:
        starts.write(f"{first}\n")
    lr, code = config.optimizer.lr, 0
    if lr > 0.5:
        sys.exit(4)
    deadline = time.monotonic() + 60
    while len([*run_dir.parent.glob("*/starts")]) < int(os.environ.get("FAKE_STARTS", 0)):
        if time.monotonic() > deadline:
            sys.exit("the other trials do not start")
        time.sleep(0.01)
    for step in range(first, steps + 1):
        loss = (math.log10(lr) + 3) ** 2 + 1 / step
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "train/loss": loss, "val/loss": loss}) + "\n")
        time.sleep(float(os.environ.get("FAKE_STEP_S", 0)))
        if stopped.is_set() and step < steps:
            code = 3
            break
    (run_dir / "times").write_text(f"{began} {time.time()}")
    sys.exit(code)


if __name__ == "__main__":
    main()
