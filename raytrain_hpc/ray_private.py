"""All private or undocumented names of Ray that the package uses: why, and which versions have them.

No other file may use one; tests/architecture checks that. Every name has a test in tests/test_ray_private.py, to be run
with a new version of Ray before the range in pyproject.toml is widened. "All versions" means 2.50 to 2.60.

Ray is imported when a function needs it: runs without Ray use this file too.
"""

from __future__ import annotations

import copyreg
import io
import logging
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

Reducer = Callable[[Any], Any]  # returns how to rebuild a value, as `__reduce__` does
LogPrinter = Callable[..., None]  # takes a batch of lines: a dict with "lines", "pid", "ip" and more


def get_draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that Ray is draining. Needs a connection.

    `ray.nodes()` does not tell, and actors get no notice. `_private.state.state`: all versions.
    """
    import ray._private.state

    return frozenset(ray._private.state.state.get_draining_nodes())


def get_free_resources() -> dict[str, dict[str, float]]:
    """Return the resources of every live node that no task, actor or placement group holds, by node id.

    `ray.available_resources` gives the sum over nodes only. `_private.state.state.available_resources_per_node`: all
    versions.
    """
    import ray._private.state

    free: dict[str, dict[str, float]] = ray._private.state.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def read_local_address() -> str | None:
    """Return the address that `ray start` or `ray.init` left on this machine, None without one; it may be outdated.

    The public functions work after connecting only, and `ray.init(address="auto")` waits long for a cluster that has
    ended. `_private.utils.read_ray_address`: all versions.
    """
    from ray._private.utils import read_ray_address

    address: str | None = read_ray_address()
    return address


@contextmanager
def hide_auth_notice() -> Iterator[None]:
    """Suppress Ray's warning that it uses an authentication token for a cluster that it started or found itself.

    The logger of this name: not 2.50, which has no tokens.
    """
    logger = logging.getLogger("ray._private.authentication.authentication_token_setup")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def start_local_ray(directory: Path, **options: Any) -> None:
    """Start Ray on this machine and connect to it, with its files below `directory`. `options`: those of `ray.init`.

    The public RAY_TMPDIR would hold for the whole process. `_temp_dir`: all versions.
    """
    import ray

    with hide_auth_notice():
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.WARNING,
            _temp_dir=str(directory),
            **options,
        )


def shut_down_ray() -> None:
    """Disconnect from Ray like `ray.shutdown`, and kill all processes of a Ray that `ray.init` started in this process.

    `ray.shutdown` sends them SIGTERM and waits a second for each, which is lost on processes that block it; so are its
    raylet's agents on the end of a raylet that was killed. `_private.worker._global_node`, its `all_processes` and
    `kill_all_processes`: all versions.
    """
    import psutil
    import ray

    node: Any = ray._private.worker._global_node
    agents: list[psutil.Process] = []
    if node is not None:
        node.kill_all_processes = partial(_kill_at_once, node.kill_all_processes)
        for info in node.all_processes.get("raylet", []):
            with suppress(psutil.NoSuchProcess):
                agents += psutil.Process(info.process.pid).children(recursive=True)
    ray.shutdown()
    for agent in agents:
        with suppress(psutil.NoSuchProcess):
            agent.kill()


def _kill_at_once(kill_all_processes: Callable[..., None], *, allow_graceful: bool, **options: bool) -> None:
    kill_all_processes(allow_graceful=False, **options)


def stop_unused_daemons() -> None:
    """Stop the log monitor, autoscaler monitor and dashboard of the Ray that `ray.init` started, which use 175 MiB.

    `ray.init` always starts them and has no option against it. `_private.worker._global_node` and its `kill_*`: all
    versions.
    """
    import ray

    node: Any = ray._private.worker._global_node
    for kill in (node.kill_log_monitor, node.kill_monitor, node.kill_dashboard):
        kill(check_alive=False)


def replace_log_printer(printer: LogPrinter) -> LogPrinter:
    """Let `printer` print workers' output and Ray's messages in the driver from now on; return the one before.

    `ray.init(log_to_driver=...)` switches all of it on or off. `_private.worker.print_to_stdstream`: all versions.
    """
    import ray._private.worker

    previous: LogPrinter = ray._private.worker.print_to_stdstream
    ray._private.worker.print_to_stdstream = printer
    return previous


def get_auth_environment() -> dict[str, str]:
    """Return the environment variable by which another process authenticates at the cluster of this one.

    `ray.init` sets it. RAY_AUTH_MODE: all versions; not set by those without token authentication.
    """
    return {name: os.environ[name] for name in ("RAY_AUTH_MODE",) if name in os.environ}


def set_default_worker_priority() -> None:
    """Make a Ray that is started after this call run workers at normal priority, unless the user has set another.

    By default they run at nice 15, below all other processes. RAY_worker_niceness: all versions.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")


def is_working_dir_copy(path: Path) -> bool:
    """Return whether `path` lies in the copy of a submitted job's --working-dir, which Ray deletes after the job.

    Folder name `working_dir_files`: all versions.
    """
    return "working_dir_files" in path.parts


def pickle_by_value(value: object, reducers: Mapping[type, Reducer] = MappingProxyType({})) -> bytes:
    """Pickle a value with the cloudpickle that Ray brings, if this process has loaded Ray, and with pickle otherwise.

    In a worker, classes of the user's script exist only as Ray has received them, by value, and pickle cannot find
    them. `reducers`: for values of exactly these types, as in `copyreg.dispatch_table`. `ray.cloudpickle.CloudPickler`:
    all versions.
    """
    base: Any = pickle.Pickler
    general: dict[type, Reducer] | ChainMap[type, Reducer] = copyreg.dispatch_table
    if "ray" in sys.modules:
        from ray.cloudpickle import CloudPickler

        base, general = CloudPickler, CloudPickler.dispatch_table

    class Pickler(base):  # type: ignore[misc]
        dispatch_table = ChainMap(dict(reducers), general)  # read by the constructor

    buffer = io.BytesIO()
    Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def pickle_with_ray(value: object) -> bytes:
    """Pickle a value as Ray does: functions and classes of `__main__` by value. `ray.cloudpickle`: all versions."""
    from ray import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return pickled
