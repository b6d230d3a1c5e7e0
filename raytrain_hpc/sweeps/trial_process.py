"""The process of a running trial: started, followed through its metrics.jsonl, and stopped with its state saved."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import IO, cast

from raytrain_hpc.driver.trial_slots import TrialSlots
from raytrain_hpc.storage.location import Location
from raytrain_hpc.storage.object_path import ObjectPath
from raytrain_hpc.storage.working_copy import find_working_directory, get_working_directory
from raytrain_hpc.sweeps.trial import Trial
from raytrain_hpc.sweeps.trial_request import TrialRequest

OUTPUT_FILE = "output.log"
_KILL_AFTER_S = 10.0


class MetricFollower:
    """Values of a metric in a metrics.jsonl that is being written, read from where the last call ended."""

    def __init__(self, path: Path, metric: str):
        self.points: dict[int, float] = {}
        self._path, self._metric, self._offset = path, metric, 0

    def read_new_points(self) -> bool:
        """Read the complete lines that were added. Return whether one of them has a finite value of the metric."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:  # not written yet
            return False
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        has_new = False
        for line in complete.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a kill left incomplete
                record = json.loads(line)
                step, value = int(record["step"]), float(record[self._metric])
                if isfinite(value):
                    self.points[step] = value  # a recomputed step is written again
                    has_new = True
        return has_new


class TrialProcess:
    """A trial and the process that trains it, with its output in output.log of the run directory.

    The process has a process group of its own: Ctrl-C in a terminal reaches the sweep alone, which then stops each
    trial once. A second signal would end a trial before it has saved. If this process is killed, the trial stops too:
    see `TrialRequest.send`.
    """

    def __init__(
        self,
        trial: Trial,
        request: TrialRequest,
        command: Sequence[str],
        slots: TrialSlots,
        metric: str,
    ):
        """Start the process with `command`, to which the run directory is appended for lists of processes."""
        self.trial = trial
        self.is_stopped_early = False  # set together with the request to stop
        self._output = _open_output(trial.run_dir)
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, str(trial.run_dir)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **slots.environment},
                pass_fds=slots.held_descriptors,
                process_group=0,
            )
        self.follower = MetricFollower(
            find_working_directory(trial.run_dir, self._process.pid) / "metrics.jsonl", metric
        )
        self._pipe = cast("IO[bytes]", self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its exit code says so
            request.send(self._pipe)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, None while it is running."""
        return self._process.poll()

    def stop(self) -> None:
        """Request to save and stop after the current step, unless that was requested before. Does not block."""
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._pipe.close()

    def save_output(self) -> None:
        """Store the output of the process that has ended, if its run is in an object store. Raises OSError."""
        if isinstance(self.trial.run_dir, ObjectPath):
            (self.trial.run_dir / OUTPUT_FILE).write_bytes(self._output.read_bytes())

    def _end(self, timeout_s: float) -> None:
        """Wait for the process to end, and kill it if it does not."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def kill_all(processes: Sequence[TrialProcess]) -> None:
        """End processes within seconds, without waiting for their state to be saved."""
        for process in processes:
            process._process.terminate()  # if it was stopped before, it now cleans up and exits
        deadline = time.monotonic() + _KILL_AFTER_S
        for process in processes:
            process._end(max(0.0, deadline - time.monotonic()))


def _open_output(run_dir: Location) -> Path:
    """Return the local file for the output of a trial, with the output of an earlier process, to be appended to."""
    path = get_working_directory(run_dir) / OUTPUT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(run_dir, ObjectPath):
        with contextlib.suppress(FileNotFoundError):
            path.write_bytes((run_dir / OUTPUT_FILE).read_bytes())
    return path
