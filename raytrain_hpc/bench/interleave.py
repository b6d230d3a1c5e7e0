"""Two trainings that are alive together and take turns on the machine, a few steps each.

A machine shared with others changes its speed by a tenth within a minute. Whole runs one after the other meet different
machines; turns of a few seconds meet the same one. Whoever is not on turn is stopped by SIGSTOP.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from raytrain_hpc.errors import RunFailedError

START_TIMEOUT_S = 300.0
# A platform's driver gives up on a worker that is silent for 10 s, and the other one can have two turns in a row.
SHORTEST_TURN_S, LONGEST_TURN_S, STEPS_PER_TURN = 2.0, 4.5, 4.5


@dataclass
class TrainingProcess:
    """A training that runs until it is ended. `commits` reads when its steps were done, `workers` its ranks' pids."""

    name: str
    process: subprocess.Popen[str]
    output: Path
    read_commit_times: Callable[[], list[float]]
    read_worker_pids: Callable[[], list[int]]
    turns: list[tuple[float, float]] = field(default_factory=list)

    def wait_for_steps(self, count: int) -> None:
        """Wait until it has done this many steps. Raises RunFailed where it ended before."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self.read_commit_times()) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise self._exit_error()
            time.sleep(0.05)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank. Raises RunFailed where one is gone."""
        for pid in self.read_worker_pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError as error:
                raise self._exit_error() from error

    def _exit_error(self) -> RunFailedError:
        lines = [line for line in self.output.read_text().splitlines() if line.strip()]
        return RunFailedError(f"{self.name} ended too soon: {lines[-1] if lines else 'no output'}")

    def run_turn(self, seconds: float) -> None:
        """Run for a while, then stop again."""
        began = time.time()
        self.send_signal(signal.SIGCONT)
        time.sleep(seconds)
        self.send_signal(signal.SIGSTOP)
        self.turns.append((began, time.time()))

    def median_step_times(self) -> list[float | None]:
        """Median time of a step in each turn, from steps that began and ended in it; None where there was none."""
        commits = self.read_commit_times()
        medians = []
        for began, ended in self.turns:
            inside = [at for at in commits if began < at < ended]
            medians.append(median(after - before for before, after in pairwise(inside)) if len(inside) > 1 else None)
        return medians

    def read_peak_rss_mib(self) -> float:
        """Peak resident memory of the first rank's process so far."""
        status = Path(f"/proc/{self.read_worker_pids()[0]}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10


@contextmanager
def launch_training(
    name: str,
    command: Sequence[str],
    environment: dict[str, str],
    output: Path,
    read_commit_times: Callable[[], list[float]],
    read_worker_pids: Callable[[], list[int]],
) -> Iterator[TrainingProcess]:
    """Start a training in a session of its own; ended at the latest when the context is left."""
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    one = TrainingProcess(name, process, output, read_commit_times, read_worker_pids)
    try:
        yield one
    finally:
        for pid in read_worker_pids():
            try:
                os.kill(pid, signal.SIGKILL)  # a stopped process hears nothing else
            except ProcessLookupError:
                continue
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def alternate(first: TrainingProcess, second: TrainingProcess, pairs: int, warmup: int) -> list[tuple[float, float]]:
    """Let the two take turns. Returns (seconds a step of the first, of the second) for each pair of turns in a row."""
    for one in (first, second):
        one.wait_for_steps(warmup)
    for one in (first, second):
        one.send_signal(signal.SIGSTOP)
    for one in (first, second):
        one.run_turn(LONGEST_TURN_S)  # until now both were alive, and on a crowded machine a step took any time
    alone = max(one.median_step_times()[0] or LONGEST_TURN_S for one in (first, second))
    seconds = min(LONGEST_TURN_S, max(SHORTEST_TURN_S, STEPS_PER_TURN * alone))
    for number in range(pairs):
        for one in (first, second) if number % 2 == 0 else (second, first):
            one.run_turn(seconds)
    both = zip(first.median_step_times()[1:], second.median_step_times()[1:], strict=True)
    kept = [(mine, other) for mine, other in both if mine is not None and other is not None]
    if len(kept) < (pairs + 1) // 2:
        raise RunFailedError(f"turns of {seconds:.0f} s are too short for a step of {alone:.1f} s")
    return kept


__all__ = ["TrainingProcess", "alternate", "launch_training"]
