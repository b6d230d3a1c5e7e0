"""What tests share: warm worker processes, one Ray cluster for the whole session, and the machine.

With `pytest -n 2` (pytest-xdist) all that starts Ray or looks at the clock stays in one process, one after the other,
and comes first; the rest runs beside it, by files, on whatever the CPUs have left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.warm_pool import WarmPool

OBJECT_STORE_BYTES = 256 << 20  # bytes: small enough for a test to fill
SERIAL_TESTS = {  # files of tests that start Ray or look at the clock
    "cli/test_wrong_inputs",
    "data/loader/test_exactly_once",
    "data/preprocess/test_executors",
    "driver/test_network_partition",
    "driver/test_ray_metrics",
    "cli/test_autotune",
    "driver/test_ray_placement",
    "driver/test_cluster_probe",
    "driver/test_ray_data",
    "driver/test_ray_faults",
    "driver/test_ray_interruption",
    "driver/test_storage_outage",
    "driver/test_two_nodes",
    "examples/test_attached_loop",
    "examples/test_custom_module",
    "examples/test_examples",
    "examples/test_training_at_scale",
    "jobs/test_job_submit",
    "distributed/test_abort",
    "runtime/test_heartbeat",
}

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # by default workers wait for everything else on the machine


@pytest.fixture(scope="session")
def pool() -> Iterator[WarmPool]:
    """Ranks on gloo without Ray."""
    made = WarmPool()
    yield made
    made.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for every test that needs one; runs inside find it and leave it running."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
    )
    yield
    ray.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _is_serial(item.nodeid))  # the longest way first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "alone" if _is_serial(nodeid) else nodeid.split("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ or _is_serial(item.nodeid):
        return
    assert "ray_cluster" not in getattr(item, "fixturenames", ()), "a file that starts Ray belongs among ALONE"
    if os.nice(0) == 0:
        os.nice(10)


def _is_serial(nodeid: str) -> bool:
    return nodeid.split("::")[0].removeprefix("tests/").removesuffix(".py") in SERIAL_TESTS
