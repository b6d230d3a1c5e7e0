"""Executors that run a task on every input partition: serial or multiprocess. Ray Data: ray_executor.py."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from raytrain_hpc.data.preprocess.partition import InputPartition
from raytrain_hpc.errors import DataError

Task = Callable[[InputPartition], Any]  # picklable; returns small JSON values


def check_main_guard(call: str) -> None:
    """Raise DataError if a starting worker process imports the main module, and with it executes `call` again.

    It would wait for the lock that its parent holds, and the parent for its worker.
    """
    frame = inspect.currentframe()
    while frame is not None:
        # The name under which multiprocessing imports the main module of the parent.
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            raise DataError(
                f"{frame.f_code.co_filename}: calls {call} when it is imported, and every worker process imports it; "
                f'put {call} under `if __name__ == "__main__":`'
            )
        frame = frame.f_back


class WorkersLostError(Exception):
    """Worker processes died for a reason other than the input. Finished chunks are kept and can be resumed from."""


class Executor(Protocol):
    """Interface that runs a task on every partition. Results come in any order."""

    def run(self, task: Task, partitions: Sequence[InputPartition]) -> Iterator[tuple[InputPartition, Any]]:
        """Yield (partition, result) as tasks finish. Raises the errors of the task, and WorkersLostError."""


class SerialExecutor:
    """Executor in this process, one partition at a time."""

    def run(self, task: Task, partitions: Sequence[InputPartition]) -> Iterator[tuple[InputPartition, Any]]:
        """Return an iterator of (partition, result), in order."""
        return ((partition, task(partition)) for partition in partitions)


class MultiprocessExecutor:
    """Executor on local processes, which are started per run and end with it or with this process."""

    def __init__(self, num_workers: int):
        self._num_workers = num_workers

    def run(self, task: Task, partitions: Sequence[InputPartition]) -> Iterator[tuple[InputPartition, Any]]:
        """Yield (partition, result) as tasks finish. At most two partitions per worker are in flight."""
        remaining = iter(partitions)
        running: dict[Future[Any], InputPartition] = {}
        num_workers = min(self._num_workers, len(partitions)) or 1
        pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), initializer=_exit_with_parent)
        try:
            while True:
                while len(running) < 2 * num_workers and (partition := next(remaining, None)) is not None:
                    running[pool.submit(task, partition)] = partition
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise WorkersLostError(
                "a worker process ended: its error is printed above, or it was killed, possibly out of memory; then "
                "use fewer workers"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _exit_with_parent() -> None:
    """Ignore Ctrl-C and exit when the parent exits. A worker would otherwise wait forever for a killed parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def exit_after_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()
