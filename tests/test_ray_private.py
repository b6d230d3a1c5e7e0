"""Every private name of Ray does what the package relies on, in the version of Ray that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from raytrain_hpc import ray_private
from tests.driver.cli_process import wait_until

START_AND_INSPECT = """
import json, os, signal, sys
from pathlib import Path
import psutil, ray
from raytrain_hpc import ray_private

def list_daemons():
    children = psutil.Process().children(recursive=True)
    lines = [" ".join(child.cmdline()) for child in children if child.status() != psutil.STATUS_ZOMBIE]
    names = ("log_monitor.py", "autoscaler/_private/monitor.py")
    return [name for name in names if any(name in line for line in lines)]

directory = Path(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # Ray's processes inherit that, and ignore ray.shutdown
ray_private.set_default_worker_priority()
ray_private.start_local_ray(directory, num_cpus=1, object_store_memory=80 << 20, log_to_driver=False)
sessions = list(directory.glob("session_*/sockets"))
niceness = ray.get(ray.remote(lambda: os.nice(0)).remote())
before = list_daemons()
ray_private.stop_unused_daemons()
still_works = ray.get(ray.remote(lambda: 7).remote())
after = list_daemons()
processes = psutil.Process().children(recursive=True)
ray_private.shut_down_ray()
_, left = psutil.wait_procs(processes, timeout=10)
print(json.dumps([len(sessions), niceness, before, after, still_works, len(processes) > 3, len(left)]))
"""


def test_no_node_of_a_cluster_at_rest_is_draining(ray_cluster: None) -> None:
    """A node that drains is listed in tests/driver/test_two_nodes.py."""
    assert ray_private.get_draining_nodes() == frozenset()


def test_free_resources_are_those_that_nothing_holds(ray_cluster: None) -> None:
    def count_free_cpus() -> float:
        return sum(resources.get("CPU", 0.0) for resources in ray_private.get_free_resources().values())

    wait_until(lambda: count_free_cpus() == 8.0, timeout_s=20)
    group = placement_group([{"CPU": 3}])
    ray.get(group.ready(), timeout=20)
    wait_until(lambda: count_free_cpus() == 5.0, timeout_s=20)
    remove_placement_group(group)
    (node_id,) = ray_private.get_free_resources()
    assert node_id == ray.get_runtime_context().get_node_id()


def test_the_address_of_a_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_private.read_local_address() is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert ray_private.read_local_address() == "10.0.0.1:6379"


def test_the_notice_about_authentication_comes_from_the_hidden_logger() -> None:
    name = "ray._private.authentication.authentication_token_setup"
    if importlib.util.find_spec("ray._private.authentication") is None:
        assert ray.__version__.startswith("2.50.")  # has no authentication tokens
        return
    logger: logging.Logger = importlib.import_module(name).logger
    assert logger.name == name
    with ray_private.hide_auth_notice():
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.isEnabledFor(logging.WARNING)


def test_a_local_ray_has_its_directory_and_priority_no_unused_daemons_and_an_end() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:  # a short path: it holds sockets
        command = [sys.executable, "-c", START_AND_INSPECT, directory]
        process = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr
        facts = json.loads(process.stdout.splitlines()[-1])
    num_sessions, niceness, before, after, still_works, has_processes, num_left = facts
    assert num_sessions > 0 and niceness == 0 and still_works == 7
    assert before == ["log_monitor.py", "autoscaler/_private/monitor.py"] and after == []
    assert has_processes and num_left == 0


def test_the_printer_of_logs_is_replaced_and_put_back() -> None:
    """That Ray calls it with these keys is tested in tests/driver/test_ray_messages.py."""
    import inspect

    import ray._private.worker as worker

    original = worker.print_to_stdstream
    assert '"lines"' in inspect.getsource(worker) and callable(original)
    assert ray_private.replace_log_printer(print) is original and worker.print_to_stdstream is print
    assert ray_private.replace_log_printer(original) is print and worker.print_to_stdstream is original


def test_the_copy_of_a_working_directory(tmp_path: Path) -> None:
    from ray._private.runtime_env.working_dir import WorkingDirPlugin

    plugin = WorkingDirPlugin(str(tmp_path), None)
    assert ray_private.is_working_dir_copy(Path(plugin._resources_dir) / "_ray_pkg_0" / "runs")
    assert not ray_private.is_working_dir_copy(tmp_path / "runs")


def test_classes_are_pickled_by_value() -> None:
    script = "class Square:\n    def __init__(self, x): self.x = x * x\nvalue = Square(3)"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(script, namespace)
    pickled = ray_private.pickle_by_value(namespace["value"])
    code = f"import pickle; print(pickle.loads({pickled!r}).x)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.stdout.strip() == "9", process.stderr
