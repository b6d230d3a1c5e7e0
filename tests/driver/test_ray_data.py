"""Training on what readers on Ray deliver: the losses of the local engine, bit for bit, whoever dies."""

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
from tests.driver.cli_process import count, curve, joined
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

WORDS = ["train.steps=700", "train.global_batch=4", "cluster.workers=2", "checkpoint.every=0", "train.micro_batch=2"]


@pytest.fixture(scope="module")
def local(ray_cluster: None, pool: WarmPool) -> list:
    """Of ranks that read for themselves, with neither Ray nor a driver."""
    return [curve(metrics) for metrics in get_step_metrics(pool.train(make_small_config(None, *WORDS))[0])]


@pytest.mark.timeout(200)
def test_readers_on_ray_give_the_same_losses_and_may_be_killed(
    local: list, tmp_path: Path, capfd: pytest.CaptureFixture[str]
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
    assert joined(tmp_path, 700) == local
    assert killed and count(tmp_path) == 700
    assert "lost" not in capfd.readouterr().out
    wait_until(lambda: not find_reader_processes())


@pytest.mark.timeout(200)
def test_an_object_store_that_others_have_filled(
    local: list, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With objects that are in use, and so cannot leave it: blocks go to disk, or ranks read for themselves."""
    import ray

    @ray.remote(num_cpus=0)
    class Hog:
        def fill(self) -> int:
            self.held = [ray.put(np.ones(OBJECT_STORE_BYTES // 8, np.uint8)) for _ in range(8)]
            self.used = [ray.get(one) for one in self.held]
            return sum(one.nbytes for one in self.used)

    hog = Hog.remote()
    try:
        assert ray.get(hog.fill.remote()) >= OBJECT_STORE_BYTES
        rt.train(make_small_config(tmp_path, *WORDS, "data.engine=ray"))
    finally:
        ray.kill(hog)
    assert joined(tmp_path, 700) == local and count(tmp_path) == 700
    assert not (tmp_path / "incidents.jsonl").exists() and "Traceback" not in capfd.readouterr().out


@pytest.mark.timeout(120)
def test_no_cpu_for_readers_is_said(ray_cluster: None) -> None:
    """The ranks are told, and then read for themselves: `tests/data/loader/test_exactly_once.py`."""
    import ray

    from raytrain_hpc.data.loader.block_stream import BlockPlan
    from raytrain_hpc.data.loader.ray_loader import Feeder, RayBlockSource
    from raytrain_hpc.data.loader.stream import StreamSpec

    @ray.remote(num_cpus=8)
    class Hog:
        def up(self) -> bool:
            return True

    hog, plan = Hog.remote(), BlockPlan(0, 8, 4, (range(2),), (0,))
    ray.get(hog.up.remote())
    recipe = StreamSpec(DataConfig(path="synthetic"), 64, 1, 16, 4, 2)
    feeder = Feeder.remote(recipe, plan, 1, 200_000)
    try:
        blocks, told = RayBlockSource(feeder, plan, 0), []

        def lost() -> bool:
            try:
                return blocks.get_block(0) is not None
            except BlocksUnavailableError as reason:
                told.append(str(reason))
            return True

        wait_until(lost)
        assert told and "no CPU is free for them: leave one to them, or set data.engine=local" in told[0]
    finally:
        ray.kill(hog)
        ray.kill(feeder)
