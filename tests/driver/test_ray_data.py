"""Training on data that Ray readers deliver: the losses of the local engine, bit for bit, under any failure."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import raytrain_hpc as rt
from raytrain_hpc.config.schema import DataConfig
from raytrain_hpc.data.loader.block_stream import BlocksUnavailableError
from tests.conftest import OBJECT_STORE_BYTES
from tests.data.loader.test_exactly_once import find_reader_processes, wait_until
from tests.driver.cli_process import count_steps, curve_point, read_curve
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

WORDS = [
    "train.steps=700",
    "train.global_batch_size=4",
    "cluster.workers=2",
    "checkpoint.interval=0",
    "train.micro_batch_size=2",
]


@pytest.fixture(scope="module")
def local_curve(ray_cluster: None, pool: WarmPool) -> list:
    """Return the curve of ranks that read their own data, without Ray or a driver."""
    return [curve_point(metrics) for metrics in get_step_metrics(pool.train(make_small_config(None, *WORDS))[0])]


@pytest.mark.timeout(200)
def test_killed_ray_readers_do_not_change_the_losses(
    local_curve: list, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = rt.start(make_small_config(tmp_path, *WORDS, "data.engine=ray"))
    killed = []

    def kill() -> None:
        while run.running and not killed:
            for pid in find_reader_processes():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    run.result(timeout=180)
    killer.join()
    assert read_curve(tmp_path, 700) == local_curve
    assert killed and count_steps(tmp_path) == 700
    assert "lost" not in capfd.readouterr().out
    wait_until(lambda: not find_reader_processes())


@pytest.mark.timeout(200)
def test_full_object_store_does_not_change_the_losses(
    local_curve: list, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fill the object store with objects in use: blocks spill to disk, or ranks read their own data."""
    import ray

    @ray.remote(num_cpus=0)
    class Occupant:
        def fill(self) -> int:
            self.held = [ray.put(np.ones(OBJECT_STORE_BYTES // 8, np.uint8)) for _ in range(8)]
            self.used = [ray.get(ref) for ref in self.held]
            return sum(array.nbytes for array in self.used)

    occupant = Occupant.remote()
    try:
        assert ray.get(occupant.fill.remote()) >= OBJECT_STORE_BYTES
        rt.train(make_small_config(tmp_path, *WORDS, "data.engine=ray"))
    finally:
        ray.kill(occupant)
    assert read_curve(tmp_path, 700) == local_curve and count_steps(tmp_path) == 700
    assert not (tmp_path / "incidents.jsonl").exists() and "Traceback" not in capfd.readouterr().out


@pytest.mark.timeout(120)
def test_missing_cpu_for_readers_is_reported(ray_cluster: None) -> None:
    """Report it to the ranks, which then read their own data: `tests/data/loader/test_exactly_once.py`."""
    import ray

    from raytrain_hpc.data.loader.block_stream import BlockPlan
    from raytrain_hpc.data.loader.ray_loader import Feeder, RayBlockSource
    from raytrain_hpc.data.loader.stream import StreamSpec

    @ray.remote(num_cpus=8)
    class Occupant:
        def up(self) -> bool:
            return True

    occupant, plan = Occupant.remote(), BlockPlan(0, 8, 4, (range(2),), (0,))
    ray.get(occupant.up.remote())
    recipe = StreamSpec(DataConfig(path="synthetic"), 64, 1, 16, 4, 2)
    feeder = Feeder.remote(recipe, plan, 1, 200_000)
    try:
        blocks, reasons = RayBlockSource(feeder, plan, 0), []

        def is_unavailable() -> bool:
            try:
                return blocks.get_block(0) is not None
            except BlocksUnavailableError as reason:
                reasons.append(str(reason))
            return True

        wait_until(is_unavailable)
        assert reasons and "no CPU is free for readers; leave one free or set data.engine=local" in reasons[0]
    finally:
        ray.kill(occupant)
        ray.kill(feeder)
