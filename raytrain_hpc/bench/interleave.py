"""Interleave training runs: all are started, and they alternate in turns of a few steps.

The speed of a shared machine varies by about 10 % within a minute, so that runs one after the other are not comparable.
Consecutive turns of a few seconds are. While one run has its turn, the others are stopped by SIGSTOP.
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
# The driver declares a worker failed after 10 s of silence, and other runs may have two turns in a row.
SHORTEST_TURN_S, LONGEST_TURN_S, STEPS_PER_TURN = 2.0, 4.5, 4.5


@dataclass
class TrainingProcess:
    """A training run in processes of its own. Callables read the times and losses of its steps, and its ranks' pids.

    Without a callable for them, the losses are not comparable with those of another run.
    """

    name: str
    process: subprocess.Popen[str]
    output: Path
    read_commit_times: Callable[[], list[float]]
    read_worker_pids: Callable[[], list[int]]
    read_losses: Callable[[], list[float]] | None = None
    turns: list[tuple[float, float]] = field(default_factory=list)

    def wait_for_steps(self, count: int) -> None:
        """Wait until `count` steps are committed.

        Raises:
            RunFailedError: The run ended or timed out before.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self.read_commit_times()) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise self._make_exit_error()
            time.sleep(0.05)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank.

        Raises:
            RunFailedError: A rank has exited.
        """
        for pid in self.read_worker_pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError as error:
                raise self._make_exit_error() from error

    def _make_exit_error(self) -> RunFailedError:
        lines = [line for line in self.output.read_text().splitlines() if line.strip()]
        return RunFailedError(f"{self.name} ended early: {lines[-1] if lines else 'no output'}")

    def run_turn(self, seconds: float) -> None:
        """Continue the run for `seconds`, then stop it again."""
        start = time.time()
        self.send_signal(signal.SIGCONT)
        time.sleep(seconds)
        self.send_signal(signal.SIGSTOP)
        self.turns.append((start, time.time()))

    def median_step_times(self) -> list[float | None]:
        """Return the median step time of each turn, over steps that lie within the turn; None if there is none."""
        commits = self.read_commit_times()
        medians = []
        for start, end in self.turns:
            in_turn = [commit for commit in commits if start < commit < end]
            medians.append(median(after - before for before, after in pairwise(in_turn)) if len(in_turn) > 1 else None)
        return medians

    def read_peak_rss_mib(self) -> float:
        """Read the peak resident memory of rank 0's process."""
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
    read_losses: Callable[[], list[float]] | None = None,
) -> Iterator[TrainingProcess]:
    """Start a training run in a new session; kill its processes when the context exits."""
    with output.open("w") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    training = TrainingProcess(name, process, output, read_commit_times, read_worker_pids, read_losses)
    try:
        yield training
    finally:
        for pid in read_worker_pids():
            try:
                os.kill(pid, signal.SIGKILL)  # a stopped process handles no other signal
            except ProcessLookupError:
                continue
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def alternate(first: TrainingProcess, second: TrainingProcess, pairs: int, warmup: int) -> list[tuple[float, float]]:
    """Alternate the two runs and return (step time of the first, of the second) for each pair of turns.

    Raises:
        RunFailedError: A run ended early, or steps are too long for the turns.
    """
    return alternate_with_each([first], second, pairs, warmup)[0]


def alternate_with_each(
    others: Sequence[TrainingProcess], run: TrainingProcess, pairs: int, warmup: int
) -> list[list[tuple[float, float]]]:
    """Alternate a run with each of several others in turn. Return, per other run, its step time and that of the run.

    In each of `pairs` rounds, every other run has one pair of consecutive turns with the run. Who begins changes from
    pair to pair.

    Raises:
        RunFailedError: A run ended early, or steps are too long for the turns.
    """
    runs = [*others, run]
    for process in runs:
        process.wait_for_steps(warmup)
    for process in runs:
        process.send_signal(signal.SIGSTOP)
    for process in (process for other in others for process in (other, run)):
        process.run_turn(LONGEST_TURN_S)  # not a result: until now all runs competed for the machine
    step_s = max(process.median_step_times()[0] or LONGEST_TURN_S for process in runs)
    seconds = min(LONGEST_TURN_S, max(SHORTEST_TURN_S, STEPS_PER_TURN * step_s))
    for number in range(pairs):
        for index, other in enumerate(others):
            for process in (other, run) if (number + index) % 2 == 0 else (run, other):
                process.run_turn(seconds)
    run_times = run.median_step_times()[len(others) :]
    times = []
    for index, other in enumerate(others):
        turns = zip(other.median_step_times()[1:], run_times[index :: len(others)], strict=True)
        complete = [(other_s, run_s) for other_s, run_s in turns if other_s is not None and run_s is not None]
        if len(complete) < (pairs + 1) // 2:
            raise RunFailedError(f"turns of {seconds:.0f} s are too short for a step of {step_s:.1f} s")
        times.append(complete)
    return times


__all__ = ["TrainingProcess", "alternate", "alternate_with_each", "launch_training"]
