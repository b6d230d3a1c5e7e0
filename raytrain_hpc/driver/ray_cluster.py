"""Connection to Ray: to the cluster of the settings, to one that runs on this machine, or to a new one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.distributed.network_interface import check_interface
from raytrain_hpc.driver.launcher_env import detect_launcher_task
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.ray_address import LOCAL, find_address_problem, get_cluster_address
from raytrain_hpc.ray_private import (
    hide_auth_notice,
    read_local_address,
    set_default_worker_priority,
    shut_down_ray,
)
from raytrain_hpc.ray_temp_dir import check_socket_path, get_ray_temp_dir


@contextmanager
def connect_ray(
    config: Config,
    num_workers: int,
    print_notice: Callable[[str], None] = lambda text: None,
    *,
    may_start: bool = True,
) -> Iterator[bool]:
    """Connect to Ray within the context, and yield whether Ray was started here.

    A connection that exists already is used and kept open. `print_notice`: prints what takes seconds, and which cluster
    is used. Raises ClusterError if Ray cannot be reached or started, or if none is running and it may not be started.
    """
    if ray.is_initialized():
        print_notice(f"ray     {_describe_cluster('the cluster of this process')}")
        yield False
        return
    with block_sigterm(), _preserve_signal_handlers():
        started = _connect(config, num_workers, print_notice, may_start=may_start)
    try:
        yield started
    finally:
        shut_down_ray()


@contextmanager
def block_sigterm() -> Iterator[None]:
    """Block SIGTERM in this thread, and for good in processes and threads that it starts within the context.

    Batch systems send it to all processes of a job, but those of a Ray that is started here are needed until the run
    has saved its state. Ray blocks SIGINT in the same way.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """Restore the handlers that Ray replaces: its SIGTERM handler exits at once, but a run saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _connect(config: Config, num_workers: int, print_notice: Callable[[str], None], *, may_start: bool) -> bool:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = _resolve_address(config)
    if address is not None:
        print_notice(f"connecting to {_name_cluster(address)}")
        try:
            with hide_auth_notice():
                ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, RayError) as error:
            raise ClusterError(
                f"cluster.address={address}: Ray did not answer: {_extract_first_line(error)}; if the cluster uses "
                "authentication, set RAY_AUTH_MODE=token and its token"
            ) from error
        print_notice(f"ray     {_describe_cluster(_name_cluster(address))}")
        return False
    if not may_start:
        raise ClusterError(
            "no Ray cluster is running on this machine; start one (`ray start --head`), set cluster.address to one, or "
            "say which devices to plan for, such as --workers 8 --device h100"
        )
    task = detect_launcher_task(os.environ)
    if task is not None and task.rank > 0:  # task 0 may be an interactive shell
        raise ClusterError(
            f"this is task {task.rank} of {task.num_tasks} of {task.launcher}: each would start its own Ray and train "
            "alone; start Ray on all nodes and the run once, as cluster/slurm.sh and cluster/pbs.sh do "
            "(ray symmetric-run), or set cluster.address to a running cluster"
        )
    check_interface(config)
    check_socket_path()
    set_default_worker_priority()  # this Ray serves the run alone
    # One CPU more than the run needs: workers that hold every CPU starve Ray Data.
    cpus = max(count_usable_cpus(), num_workers + 1)
    print_notice("starting Ray on this machine, which takes some seconds")
    try:
        with hide_auth_notice():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray raises a plain Exception if its processes start too slowly
        reason = _extract_first_line(error)
        raise ClusterError(f"Ray did not start on this machine: {reason}; see {get_ray_temp_dir()}") from error
    print_notice(f"ray     {_describe_cluster('started on this machine for this run')}")
    return True


def _name_cluster(address: str) -> str:
    return "the cluster that runs on this machine" if address == AUTO else f"the cluster at {address}"


def _describe_cluster(name: str) -> str:
    """Return a name with the size of the cluster that this process is connected to."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    num_nodes = sum(key.startswith("node:") and key != "node:__internal_head__" for key in resources)
    nodes = f"{num_nodes} nodes, " if num_nodes > 1 else ""
    return f"{name}: {nodes}{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"


def _resolve_address(config: Config) -> str | None:
    """Return the address of the cluster to join, or None to start one."""
    address = get_cluster_address(config)
    if address == LOCAL:
        return None
    # Join a cluster on this machine as "auto": given its address, Ray would not look up its authentication token.
    if address != AUTO and "RAY_ADDRESS" not in os.environ and is_same_address(address, read_local_address()):
        return AUTO
    return address if address != AUTO or _is_ray_running_locally() else None


def is_same_address(address: str, local_address: str | None) -> bool:
    """Return whether an address is that of the cluster on this machine, `local_address`, perhaps by a loopback host."""
    if local_address is None:
        return False
    host, _, port = address.rpartition(":")
    local_host, _, local_port = local_address.rpartition(":")
    return port == local_port and host in (local_host, "127.0.0.1", "localhost")


def _is_ray_running_locally() -> bool:
    """Return whether a cluster that `ray start` left running on this machine still answers."""
    address = read_local_address()
    return address is not None and find_address_problem(address) is None


def _extract_first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
