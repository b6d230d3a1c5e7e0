"""Ray Data executor for input partitions, on a cluster or on a local Ray instance started for the run."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_hpc.config.schema import AUTO
from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.data.preprocess.executors import Task, WorkersLostError
from raytrain_hpc.data.preprocess.partition import InputPartition
from raytrain_hpc.errors import ClusterError, DataError
from raytrain_hpc.ray_address import LOCAL, START_RAY, find_address_problem
from raytrain_hpc.ray_private import hide_auth_notice, stop_unused_daemons
from raytrain_hpc.ray_temp_dir import check_socket_path

# Only partition descriptions and reports pass through the object store, tokens through files. Ray's minimum size.
_OBJECT_STORE_BYTES = 80 << 20
# Local Ray is a dozen processes. These settings save tens of MiB in total at no cost in speed.
_LOW_MEMORY_ENV = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OPENBLAS_NUM_THREADS": "1",
}


class RayDataExecutor:
    """Executor with one Ray Data task per partition. Tasks lost with their node are retried on another."""

    def __init__(self, address: str | None, num_workers: int | None):
        """Check the address. None or "local" starts a local Ray; `num_workers`: concurrent tasks, None: all CPUs.

        Raises ClusterError if Ray does not answer at the address: Ray itself would retry for much longer.
        """
        self._address, self._num_workers = address, num_workers
        is_explicit = address not in (None, AUTO, LOCAL) and not ray.is_initialized()
        if is_explicit and (problem := find_address_problem(str(address))) is not None:
            raise ClusterError(f"address={address}: {problem}; {START_RAY}, or use --engine local")

    def run(self, task: Task, partitions: Sequence[InputPartition]) -> Iterator[tuple[InputPartition, Any]]:
        """Yield (partition, result) as tasks finish. Raises ClusterError if Ray cannot be reached or started."""
        if not partitions:
            return
        with _connect_to_ray(self._address, self._num_workers), _silence_ray_data():
            rows = [{"piece": pickle.dumps(partition)} for partition in partitions]
            dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
            results = dataset.map(_TaskWrapper(task), num_cpus=1, **_limit_tasks(self._num_workers))
            try:
                for row in results.iter_rows():
                    yield partitions[row["index"]], _unwrap_result(row)
            except RayError as error:
                raise WorkersLostError(f"Ray: {_get_first_line(error)}") from error


def _limit_tasks(count: int | None) -> dict[str, Any]:
    """Return the arguments of `Dataset.map` for at most `count` tasks at a time, None: as many as there are CPUs."""
    if hasattr(ray.data, "TaskPoolStrategy"):
        return {"compute": ray.data.TaskPoolStrategy(count)}
    return {"concurrency": count}  # Ray 2.50


class _TaskWrapper:
    """Adapter of a task to Ray Data. Returns errors about the input as values, apart from errors of Ray."""

    def __init__(self, task: Task):
        self._task = task

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        partition: InputPartition = pickle.loads(row["piece"])
        reply = {"index": partition.index, "result": "", "data_error": "", "os_error": ""}
        try:
            reply["result"] = json.dumps(self._task(partition))
        except DataError as error:
            reply["data_error"] = str(error)
        except OSError as error:
            reply["os_error"] = str(error.strerror or error)
        return reply


def _unwrap_result(row: dict[str, Any]) -> Any:
    if row["data_error"]:
        raise DataError(row["data_error"])
    if row["os_error"]:
        raise OSError(row["os_error"])
    return json.loads(row["result"])


@contextmanager
def _connect_to_ray(address: str | None, num_workers: int | None) -> Iterator[None]:
    """Connect to Ray inside the context, and shut down after it. Keeps an existing connection."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    is_local = address in (None, LOCAL)
    if is_local:
        check_socket_path()
    options: dict[str, Any] = {"address": address}
    if is_local:
        local_options = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        options = {"address": "local", "num_cpus": num_workers or count_usable_cpus(), **local_options}
    try:
        with hide_auth_notice(), _set_environment(_LOW_MEMORY_ENV if is_local else {}):
            ray.init(**options, log_to_driver=False, logging_level=logging.WARNING)
            if is_local:
                stop_unused_daemons()
    except Exception as error:  # Ray raises a plain Exception if its processes start too slowly
        raise ClusterError(f"address={address or LOCAL}: Ray did not start: {_get_first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _set_environment(defaults: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside the context, unless the user has set them."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _silence_ray_data() -> Iterator[None]:
    """Disable the progress bars and execution logs of Ray Data inside the context."""
    context = ray.data.DataContext.get_current()
    logger = logging.getLogger("ray.data")
    previous = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = previous[0]
        logger.setLevel(previous[1])


def _get_first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
