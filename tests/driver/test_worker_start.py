"""Start of workers on a fake Ray: replacements that fail to start are started again while others wait for them."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.worker_group import ActorPool
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.topology import Node, Topology
from tests.driver.fake_ray import FakeRay, FakeRef, Scenario

CLUSTER = Topology((Node("n0", "10.0.0.1", 2),), "cuda", "h100")


class FailingStarts(FakeRay):
    """A fake Ray on which the next `failing` actors do not start."""

    failing = 0

    def call(self, target: Any, name: str, arguments: tuple[Any, ...]) -> FakeRef:
        if name == "describe" and self.failing:
            self.failing -= 1
            return FakeRef().resolve(error=ActorDiedError())
        return super().call(target, name, arguments)


@pytest.mark.parametrize(("failing", "recovers"), [(0, True), (1, True), (3, True), (4, False)])
def test_failed_start_of_the_only_replacement_is_repeated(failing: int, recovers: bool) -> None:
    with FailingStarts(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(None, ["cluster.start_timeout=20"]), 2, CLUSTER, fake_ray.workers)
        pool.start()
        pool.replace_worker(pool.ready[0])
        fake_ray.failing = failing
        if recovers:
            pool.wait_for_workers(2)
            assert [worker.worker_id for worker in pool.ready] == [1, 2 + failing]
        else:
            with pytest.raises(ClusterError, match="only 1 of 2 workers"):
                pool.wait_for_workers(2)


def test_failed_first_start_ends_the_run() -> None:
    with FailingStarts(CLUSTER, Scenario()) as fake_ray:
        pool = ActorPool(load_config(), 2, CLUSTER, fake_ray.workers)
        fake_ray.failing = 1
        with pytest.raises(ClusterError, match="a worker did not start"):
            pool.start()
