"""The command line and scripts as processes, forked from one that has already imported torch."""

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

Curve = list[tuple[float, float, float]]  # loss, gradient norm and learning rate of each step
TIMEOUT_S = 120
# Several microbatches per step, so that a signal arrives within a step; dropout, whose random bits must be replayed.
WORDS = [
    *SMALL_OVERRIDES,
    "model.dropout=0.1",
    "train.steps=24",
    "train.micro_batch_size=2",
    "checkpoint.interval=4",
    "cluster.workers=0",
]

SERVER = """
import json, os, runpy, sys, traceback
import numpy, torch, torch._inductor  # everything that a run imports
import raytrain_hpc.driver.local_backend, raytrain_hpc.driver.supervisor, raytrain_hpc.cli.train_summary
from raytrain_hpc.cli.main import main

def run_command(argv, out, patch="", script=None):
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    exec(patch, {})
    code = 1
    try:
        if script is None:
            main(argv)
        os.chdir(os.path.dirname(out))
        sys.argv, sys.path[0] = [script, *argv], os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)

for line in sys.stdin:
    request = json.loads(line)
    if "argv" in request:
        reply = os.fork() or run_command(**request)
    else:
        pid, status = os.waitpid(request["pid"], os.WNOHANG)
        reply = os.waitstatus_to_exitcode(status) if pid else None
    print(json.dumps(reply), flush=True)
"""


class CliRunner:
    """Starts `raytrain-hpc` processes."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._running: set[int] = set()

    def start(self, out: Path, *argv: str, patch: str = "") -> CliProcess:
        """Start one process. `patch` is code that it executes first. Its output is appended to the file `out`."""
        pid = self.send({"argv": argv, "out": str(out), "patch": patch})
        self._running.add(pid)
        return CliProcess(self, pid, out)

    def run(self, out: Path, *argv: str, patch: str = "") -> tuple[int, str]:
        """Run one process to its end; return its exit code and its output."""
        before = len(out.read_text()) if out.exists() else 0
        code = self.start(out, *argv, patch=patch).wait()
        return code, out.read_text()[before:]

    def run_script(self, out: Path, script: Path, *argv: str, patch: str = "") -> tuple[int, str]:
        """Run a Python script to its end in the directory of `out`; return its exit code and its output.

        `patch`: code that is executed first.
        """
        pid = self.send({"script": str(script), "argv": argv, "out": str(out), "patch": patch})
        self._running.add(pid)
        return CliProcess(self, pid, out).wait(), out.read_text()

    def send(self, request: dict[str, Any]) -> Any:
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        reply = json.loads(self._server.stdout.readline())
        if "pid" in request and reply is not None:
            self._running.discard(request["pid"])
        return reply

    def close(self) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        self._server.kill()
        self._server.communicate()


class CliProcess:
    """One process of the command line."""

    def __init__(self, runner: CliRunner, pid: int, out: Path) -> None:
        self._runner, self.pid, self.out = runner, pid, out

    def wait(self) -> int:
        """Wait for the end; return the exit code, or minus the signal that ended the process."""
        code = None

        def has_ended() -> bool:
            nonlocal code
            code = self._runner.send({"pid": self.pid})
            return code is not None

        wait_until(has_ended, self.out)
        return code

    def wait_until_stopped(self) -> None:
        """Wait until SIGSTOP has taken effect."""
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", self.out)


def wait_until(condition: Callable[[], bool], out: Path | None = None, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until `condition` holds; raise TimeoutError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(out.read_text() if out is not None and out.exists() else "timed out")
        time.sleep(0.01)


def count_steps(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def read_curve(run_dir: Path, steps: int = 24) -> Curve:
    """Return loss, gradient norm and learning rate of steps 1..N, of which the last line of each counts."""
    metrics_of_step = {
        line["step"]: line for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    }
    assert sorted(metrics_of_step) == list(range(1, steps + 1))
    return [curve_point(metrics_of_step[step]) for step in sorted(metrics_of_step)]


def curve_point(metrics: dict[str, Any]) -> tuple[float, float, float]:
    return metrics["train/loss"], metrics["train/grad_norm"], metrics["train/lr"]


def signal_after(step: int, number: signal.Signals, delay_s: float = 0.0) -> str:
    """Return a patch: the process receives a signal `delay_s` after a step is committed."""
    return f"""
import os, threading
from raytrain_hpc.driver.run_recorder import RunRecorder
real = RunRecorder._handle_step
def handle_step(self, metrics):
    real(self, metrics)
    if metrics["step"] == {step}:
        threading.Timer({delay_s}, os.kill, (os.getpid(), {int(number)})).start()
RunRecorder._handle_step = handle_step
"""


__all__ = [
    "WORDS",
    "CliProcess",
    "CliRunner",
    "Curve",
    "count_steps",
    "curve_point",
    "read_curve",
    "signal_after",
    "wait_until",
]
