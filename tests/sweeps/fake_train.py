"""A stand-in for `raytrain-hpc train` that takes milliseconds: losses are a formula, and the files those of a run.

The loss of step s is (log10(optimizer.lr) + 3)^2 + 1 / s. A run resumes, ends with exit code 3 on SIGTERM, and fails if
the learning rate is above 0.5. FAKE_STEP_S: seconds per step. `starts` in the run directory has the first step of each
start, and `times` its begin and end.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    run_dir, steps = Path(settings["run.dir"]), int(settings.get("train.steps", 4))
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    began = time.time()
    (run_dir / "config.yaml").write_text(f"run: {{name: '{settings['run.name']}'}}\ntrain: {{steps: {steps}}}\n")
    metrics = run_dir / "metrics.jsonl"
    first = len(metrics.read_text().splitlines()) + 1 if metrics.exists() else 1
    with (run_dir / "starts").open("a") as starts:
        starts.write(f"{first}\n")
    lr, code = float(settings["optimizer.lr"]), 0
    if lr > 0.5:
        sys.exit(4)
    for step in range(first, steps + 1):
        loss = (math.log10(lr) + 3) ** 2 + 1 / step
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "train/loss": loss, "val/loss": loss}) + "\n")
        time.sleep(float(os.environ.get("FAKE_STEP_S", 0)))
        if stopped and step < steps:
            code = 3
            break
    (run_dir / "times").write_text(f"{began} {time.time()}")
    sys.exit(code)


if __name__ == "__main__":
    main()
