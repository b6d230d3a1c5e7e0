"""Lives of a run: the command line in processes of its own, forked from one that has torch imported already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.warm_pool import SMALL_OVERRIDES

TIMEOUT_S = 120
# Several microbatches a step, so that a signal hits it in the middle, and dropout: random bits to be replayed.
WORDS = [
    *SMALL_OVERRIDES,
    "model.dropout=0.1",
    "train.steps=24",
    "train.micro_batch=2",
    "checkpoint.every=4",
    "cluster.workers=0",
]

PARENT = """
import json, os, sys
import numpy, torch, torch._inductor  # all that a life would import
import raytrain_hpc.driver.local_backend, raytrain_hpc.driver.supervisor, raytrain_hpc.cli.train_summary
from raytrain_hpc.cli.main import main

def live(argv, out, patch):
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    exec(patch, {})
    code = 1
    try:
        main(argv)
    except SystemExit as error:
        code = error.code or 0
    finally:
        sys.stdout.flush()
        os._exit(code)

for line in sys.stdin:
    ask = json.loads(line)
    if "argv" in ask:
        answer = os.fork() or live(**ask)
    else:
        pid, status = os.waitpid(ask["pid"], os.WNOHANG)
        answer = os.waitstatus_to_exitcode(status) if pid else None
    print(json.dumps(answer), flush=True)
"""


class Lives:
    """Starts `raytrain-hpc` again and again."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._running: set[int] = set()

    def start(self, out: Path, *argv: str, patch: str = "") -> Life:
        """One life; `patch` is code that it executes first. Output goes to the end of the file `out`."""
        pid = self.ask({"argv": argv, "out": str(out), "patch": patch})
        self._running.add(pid)
        return Life(self, pid, out)

    def run(self, out: Path, *argv: str, patch: str = "") -> tuple[int, str]:
        """One life to its end: exit code and what it printed."""
        before = len(out.read_text()) if out.exists() else 0
        code = self.start(out, *argv, patch=patch).wait()
        return code, out.read_text()[before:]

    def ask(self, what: dict[str, Any]) -> Any:
        self._parent.stdin.write(json.dumps(what) + "\n")
        self._parent.stdin.flush()
        answer = json.loads(self._parent.stdout.readline())
        if "pid" in what and answer is not None:
            self._running.discard(what["pid"])
        return answer

    def close(self) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        self._parent.kill()
        self._parent.communicate()


class Life:
    """One process of it."""

    def __init__(self, lives: Lives, pid: int, out: Path) -> None:
        self._lives, self.pid, self.out = lives, pid, out

    def wait(self) -> int:
        """Exit code, or minus the signal that ended it."""
        code = None

        def ended() -> bool:
            nonlocal code
            code = self._lives.ask({"pid": self.pid})
            return code is not None

        until(ended, self.out)
        return code

    def until_stopped(self) -> None:
        """Wait until SIGSTOP has taken effect."""
        stat = Path(f"/proc/{self.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", self.out)


def until(holds: Callable[[], bool], out: Path | None = None, timeout_s: float = TIMEOUT_S) -> None:
    """Wait for something to become true, not for ever."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(out.read_text() if out is not None and out.exists() else "it did not happen")
        time.sleep(0.01)


def count(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def joined(run_dir: Path, steps: int = 24) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of steps 1..N, the last line of a step counting. Every line is whole."""
    last = {line["step"]: line for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}
    assert sorted(last) == list(range(1, steps + 1))
    return [curve(last[step]) for step in sorted(last)]


def curve(metrics: dict[str, Any]) -> tuple[float, float, float]:
    return metrics["train/loss"], metrics["train/grad_norm"], metrics["train/lr"]


def signal_after(step: int, number: signal.Signals, delay_s: float = 0.0) -> str:
    """A patch: the process is sent a signal this long after a step is committed."""
    return f"""
import os, threading
from raytrain_hpc.driver.run_recorder import RunRecorder
real = RunRecorder._handle_step
def take(self, metrics):
    real(self, metrics)
    if metrics["step"] == {step}:
        threading.Timer({delay_s}, os.kill, (os.getpid(), {int(number)})).start()
RunRecorder._handle_step = take
"""


__all__ = ["WORDS", "Life", "Lives", "count", "curve", "joined", "signal_after", "until"]
