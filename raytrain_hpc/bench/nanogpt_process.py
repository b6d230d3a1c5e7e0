"""Run nanoGPT's `train.py` and write the time of every iteration: `python nanogpt_process.py CLONE DIRECTORY ARGS...`.

Iterations are recognized by the line that train.py prints after each one; nothing of it is changed.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def make_meta(vocab_size: int) -> bytes:
    """Return the meta.pkl of a dataset, from which train.py takes the vocabulary size."""
    return pickle.dumps({"vocab_size": vocab_size})


def main(clone: Path, directory: Path, arguments: list[str]) -> None:
    """Train in `directory`, which has the dataset, and append a line per iteration to its steps.jsonl."""
    os.symlink(clone / "configurator.py", directory / "configurator.py")  # train.py opens it in the current directory
    os.chdir(directory)
    sys.path.insert(0, str(clone))
    sys.argv = [str(clone / "train.py"), *arguments]
    plain_print = builtins.print
    with (directory / "steps.jsonl").open("a") as steps:

        def print_and_record(*values: Any, **options: Any) -> None:
            plain_print(*values, **options)
            if values and str(values[0]).startswith("iter "):
                steps.write(json.dumps({"unix": time.time()}) + "\n")
                steps.flush()

        builtins.print = print_and_record
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
