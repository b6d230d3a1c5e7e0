"""What tests share: warm worker processes, one Ray cluster for the whole session, and the machine.

With `pytest -n 2` (pytest-xdist) all that starts Ray or looks at the clock stays in one process, one after the other,
and comes first; the rest runs beside it, by files, on whatever the CPUs have left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.pool import WarmPool

OBJECT_STORE = 256 << 20  # bytes: small enough for a test to fill
ALONE = "alone"  # the group, and the mark, of all that must not be disturbed

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
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=OBJECT_STORE
    )
    yield
    ray.shutdown()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.xdist_group(ALONE if _alone(item) else str(item.path)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _alone(item))  # the longest way first


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and not _alone(item) and os.nice(0) == 0:
        os.nice(10)


def _alone(item: pytest.Item) -> bool:
    return "ray_cluster" in getattr(item, "fixturenames", ()) or item.get_closest_marker(ALONE) is not None
