"""What tests share: warm worker processes and one Ray cluster for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.pool import WarmPool

OBJECT_STORE = 256 << 20  # bytes: small enough for a test to fill

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
