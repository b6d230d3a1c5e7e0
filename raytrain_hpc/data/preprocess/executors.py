"""Who works on the pieces of an input: this process, or processes of its own. Ray Data is in ray_prepare.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from raytrain_hpc.data.preprocess.partition import InputPartition

Task = Callable[[InputPartition], Any]  # picklable, and so is what it returns: small, and JSON values


class WorkersLostError(Exception):
    """Workers went away through no fault of the input: what they finished is there, and can be gone on with."""


class Executor(Protocol):
    """Runs a task on every piece. Results come in any order."""

    def run(self, task: Task, partitions: Sequence[InputPartition]) -> Iterator[tuple[InputPartition, Any]]:
        """(Piece, result) as they come. Raises what the task raises, or WorkersLost."""


class SerialExecutor:
    """One piece after the other."""

    def run(self, task: Task, partitions: Sequence[InputPartition]) -> Iterator[tuple[InputPartition, Any]]:
        """(Piece, result), in order."""
        return ((piece, task(piece)) for piece in partitions)


class MultiprocessExecutor:
    """Processes on this machine, started for each run and gone with it, or with this process."""

    def __init__(self, num_workers: int):
        self._num_workers = num_workers

    def run(self, task: Task, partitions: Sequence[InputPartition]) -> Iterator[tuple[InputPartition, Any]]:
        """(Piece, result) as they come; a few pieces are handed out ahead."""
        left = iter(partitions)
        running: dict[Future[Any], InputPartition] = {}
        workers = min(self._num_workers, len(partitions)) or 1
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_exit_with_parent)
        try:
            while True:
                while len(running) < 2 * workers and (piece := next(left, None)) is not None:
                    running[pool.submit(task, piece)] = piece
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise WorkersLostError("a worker process was killed, perhaps for its memory: use fewer workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def count_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def _exit_with_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it ends: a worker would wait for ever for a parent that was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait_for_the_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
