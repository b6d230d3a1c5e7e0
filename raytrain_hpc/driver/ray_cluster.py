"""Getting hold of Ray: the cluster that was named, the one that is there, or one of our own."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.launcher_env import detect_launcher_task
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.ray_address import LOCAL, get_cluster_address, hide_auth_notice, is_reachable


@contextmanager
def connect_ray(config: Config, num_workers: int) -> Iterator[bool]:
    """Be connected to Ray inside; True where it was started here. Leaves a connection that was there before alone."""
    if ray.is_initialized():
        yield False
        return
    with _preserve_signal_handlers():
        started = _connect(config, num_workers)
    try:
        yield started
    finally:
        ray.shutdown()


@contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """Ray replaces the SIGTERM handler by one that exits at once; a run wants to save first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _connect(config: Config, num_workers: int) -> bool:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = _resolve_address(config)
    if address is not None:
        try:
            with hide_auth_notice():
                ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, RayError) as error:
            raise ClusterError(
                f"cluster.address={address}: Ray did not answer: {_extract_first_line(error)}"
            ) from error
        return False
    task = detect_launcher_task(os.environ)
    if task is not None and task.rank > 0:  # the first may be somebody's shell
        raise ClusterError(
            f"{task.launcher} has started {task.num_tasks} of these, and this is number {task.rank}: it would train alone, "
            "on a Ray of its own; start Ray on all nodes and the run once, as cluster/slurm.sh and cluster/pbs.sh do "
            "(ray symmetric-run), or name a cluster that is there (cluster.address)"
        )
    # Training is what this Ray is for: by default Ray runs workers at nice 15, behind everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Our own Ray on one machine: enough slots for the run, and one CPU more, since trainers that hold every CPU
    # starve Ray Data.
    cpus = max(os.cpu_count() or 1, num_workers + 1)
    try:
        with hide_auth_notice():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray raises a plain one where its processes start too slowly
        raise ClusterError(f"Ray did not start on this machine: {_extract_first_line(error)}; see /tmp/ray") from error
    return True


def _resolve_address(config: Config) -> str | None:
    """The cluster to join, None to start one."""
    address = get_cluster_address(config)
    if address == LOCAL:
        return None
    # What runs here is joined as "auto": by its own address Ray would not look for the token it asks for.
    return address if address != AUTO or _is_ray_running_locally() else None


def _is_ray_running_locally() -> bool:
    """Whether a cluster that `ray start` left running on this machine still answers."""
    from ray._private.utils import read_ray_address  # no public call tells without connecting

    address: str | None = read_ray_address()
    return address is not None and is_reachable(address)


def _extract_first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
