"""Pieces of an input through Ray Data, on a cluster or on a Ray that is started for it."""

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

from raytrain_hpc.data.preprocess.executors import Task, WorkersLostError, count_cpus
from raytrain_hpc.data.preprocess.partition import InputPartition
from raytrain_hpc.errors import ClusterError, DataError
from raytrain_hpc.ray_address import LOCAL, hide_auth_notice, is_reachable

# Descriptions of pieces go in and reports come out; tokens pass through files. Ray refuses less.
_OBJECT_STORE_BYTES = 80 << 20
# Ray on one machine is a dozen processes: with these they take tens of MiB less together, and nothing is slower.
_LOW_MEMORY_ENV = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "OPENBLAS_NUM_THREADS": "1",
}


class RayDataExecutor:
    """Tasks of Ray Data, one a piece; a task that is lost with its node is run again elsewhere."""

    def __init__(self, address: str | None, num_workers: int | None):
        """`address`: of a cluster, None or "local" for a Ray of its own; `workers`: tasks at a time, None: all CPUs.

        ClusterError where nothing answers at the address: Ray itself tries for much longer.
        """
        self._address, self._num_workers = address, num_workers
        named = address not in (None, LOCAL) and ":" in str(address) and not ray.is_initialized()
        if named and not is_reachable(str(address).removeprefix("ray://")):
            raise ClusterError(
                f"address={address}: nothing answers there; start Ray with `ray start --head`, correct the address, "
                "or use --engine local"
            )

    def run(self, task: Task, partitions: Sequence[InputPartition]) -> Iterator[tuple[InputPartition, Any]]:
        """(Piece, result) as they come. ClusterError where no Ray can be had."""
        if not partitions:
            return
        with _connect_to_ray(self._address, self._num_workers), _silence_ray_data():
            rows = [{"piece": pickle.dumps(piece)} for piece in partitions]
            described = ray.data.from_items(rows, override_num_blocks=len(rows))
            done = described.map(_TaskWrapper(task), compute=ray.data.TaskPoolStrategy(self._num_workers), num_cpus=1)
            try:
                for row in done.iter_rows():
                    yield partitions[row["index"]], _unwrap_result(row)
            except RayError as error:
                raise WorkersLostError(f"Ray: {_get_first_line(error)}") from error


class _TaskWrapper:
    """The task as Ray Data wants it. Its errors travel as values: they concern the input, and not Ray."""

    def __init__(self, task: Task):
        self._task = task

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        piece: InputPartition = pickle.loads(row["piece"])
        answer = {"index": piece.index, "result": "", "data_error": "", "os_error": ""}
        try:
            answer["result"] = json.dumps(self._task(piece))
        except DataError as error:
            answer["data_error"] = str(error)
        except OSError as error:
            answer["os_error"] = str(error.strerror or error)
        return answer


def _unwrap_result(row: dict[str, Any]) -> Any:
    if row["data_error"]:
        raise DataError(row["data_error"])
    if row["os_error"]:
        raise OSError(row["os_error"])
    return json.loads(row["result"])


@contextmanager
def _connect_to_ray(address: str | None, num_workers: int | None) -> Iterator[None]:
    """Be connected to Ray inside. Leaves a connection that was there before alone."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own = address in (None, LOCAL)
    where: dict[str, Any] = {"address": address}
    if own:
        store = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        where = {"address": "local", "num_cpus": num_workers or count_cpus(), **store}
    try:
        with hide_auth_notice(), _set_environment(_LOW_MEMORY_ENV if own else {}):
            ray.init(**where, log_to_driver=False, logging_level=logging.WARNING)
            if own:
                _stop_unused_daemons()
    except Exception as error:  # Ray raises a plain one where its processes start too slowly
        raise ClusterError(f"address={address or LOCAL}: Ray did not start: {_get_first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _stop_unused_daemons() -> None:
    """End what passes on logs, scales clusters and serves pages: 175 MiB, and here is nobody that needs any of it.

    `ray.init` always starts them, and knows no word for not wanting them.
    """
    node: Any = ray._private.worker._global_node
    for end in (node.kill_log_monitor, node.kill_monitor, node.kill_dashboard):
        end(check_alive=False)


@contextmanager
def _set_environment(defaults: dict[str, str]) -> Iterator[None]:
    """Environment variables for the processes that are started inside, unless the user has set them."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _silence_ray_data() -> Iterator[None]:
    """Without Ray Data's own bars and its lines on every execution."""
    context = ray.data.DataContext.get_current()
    logger = logging.getLogger("ray.data")
    before = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = before[0]
        logger.setLevel(before[1])


def _get_first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
