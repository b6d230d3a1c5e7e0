"""Slots for the trials of a sweep, found by a process that keeps a Ray that it has started until all trials have ended.

A Ray ends with the process that has started it. If that were the sweep, its trials could not save their state after it
was killed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, cast

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.parent_pipe import read_message, wait_until_closed
from raytrain_hpc.driver.trial_slots import TrialSlots, connect_trial_slots, count_local_slots
from raytrain_hpc.errors import ClusterError, RaytrainError
from raytrain_hpc.ray_address import check_address

_END_TIMEOUT_S = 30.0  # for Ray to shut down


@contextmanager
def open_trial_slots(config: Config, at_once: int) -> Iterator[TrialSlots]:
    """Yield the free slots for runs that differ little from `config`.

    They are those of the running Ray cluster. Without one, Ray is started here for all runs, with CPUs for at least
    `at_once` of them: each run would otherwise start its own, with an object store of its own. Runs in one process
    (cluster.workers=0) need no Ray.
    """
    if config.cluster.workers == 0:
        yield count_local_slots(config)
        return
    import ray

    if ray.is_initialized():
        with connect_trial_slots(config, at_once) as slots:
            yield slots
        return
    check_address(config)
    with _open_ray_host(config, at_once) as slots:
        yield slots


@contextmanager
def _open_ray_host(config: Config, at_once: int) -> Iterator[TrialSlots]:
    """Start the process, and yield the slots that it finds.

    `held_descriptors` of the slots is the pipe that keeps a started Ray: processes that inherit it are its users.
    Raises ClusterError if Ray cannot be reached or started.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "raytrain_hpc.driver.ray_host"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C in a terminal does not reach it
    )
    request, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    try:
        pickle.dump((config, at_once), request)
        request.flush()
        try:
            answer: TrialSlots | RaytrainError = pickle.load(answers)
        except EOFError as error:
            raise ClusterError(f"the process that starts Ray has ended with exit code {process.wait()}") from error
        if isinstance(answer, RaytrainError):
            raise answer
        yield replace(answer, held_descriptors=(request.fileno(),))
    finally:
        with suppress(BrokenPipeError):  # it has ended already
            request.close()
        answers.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # which ends its Ray too
            process.wait()


def main() -> None:
    """Send the slots, or the error that a user should see, and keep Ray until standard input is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job, of which the trials save now
        signal.signal(number, signal.SIG_IGN)
    (config, at_once), pipe = read_message()
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # what Ray prints is not for the pipe
        try:
            with connect_trial_slots(config, at_once) as slots:
                pickle.dump(slots, answers)
                answers.flush()
                if slots.is_ray_started:
                    wait_until_closed(pipe)
        except RaytrainError as error:
            pickle.dump(error, answers)


if __name__ == "__main__":
    main()
