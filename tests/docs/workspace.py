"""The folder in which the commands of a page run: small texts, and a run, under the names that the pages use."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

from raytrain_hpc.cli.main import main

# Appended to every training command, so that it takes a fraction of a second and no Ray.
TINY = [
    "model.hidden_size=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "train.seq_len=16",
    "train.global_batch_size=8",
    "train.steps=4",
    "lr_scheduler.warmup_steps=1",
    "eval.samples=4",
    "cluster.workers=0",
    "logging.tensorboard=false",
    "logging.sample_tokens=8",
]
_SENTENCE = "The lease names the driver that may publish; a second driver is refused. "


def make_workspace(root: Path) -> None:
    """Create the folder. Call with the folder as the working directory."""
    for folder in ("my_texts", "other_texts", "scratch"):
        (root / folder).mkdir()
    for number in range(3):
        (root / "my_texts" / f"{number}.txt").write_text(_SENTENCE * 40)
        (root / "other_texts" / f"{number}.txt").write_text(_SENTENCE.upper() * 20)
    (root / "tinyshakespeare.txt").write_text(_SENTENCE * 100)
    (root / "my_texts.jsonl").write_text("".join(json.dumps({"text": _SENTENCE * 3}) + "\n" for _ in range(20)))
    pairs = ({"question": f"What is {number} + 1?", "answer": f"{number + 1}"} for number in range(200))
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    call(["train", *TINY])  # runs/quickstart
    call(["export", "runs/quickstart", "--out", "my_llama"])


def call(arguments: Sequence[str]) -> str:
    """Run raytrain-hpc in this process and return its output. Raises AssertionError unless it exits with 0."""
    output, code = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = int(str(end.code or 0))
    assert code == 0, f"raytrain-hpc {' '.join(arguments)}: exit code {code}: {output.getvalue()}"
    return output.getvalue()
