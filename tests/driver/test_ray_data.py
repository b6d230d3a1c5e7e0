"""Training on data that Ray readers deliver: the losses of the local engine, bit for bit, under any failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import raytrain_hpc as rt
from raytrain_hpc.config.schema import DataConfig
from raytrain_hpc.data.loader.block_stream import BlocksUnavailableError
from tests.conftest import OBJECT_STORE_BYTES
from tests.data.loader.test_exactly_once import find_reader_processes, wait_until
from tests.driver.cli_process import count_steps, curve_point, read_curve
from tests.driver.throttle import throttle
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

# At a constant learning rate, the curve does not depend on the last step.
WORDS = ["train.steps=20000", "lr_scheduler.name=constant", "train.global_batch_size=4", "train.micro_batch_size=2"]
WORDS += ["cluster.workers=2", "checkpoint.interval=0"]


def stop_and_compare(run: rt.Run, run_dir: Path, pool: WarmPool) -> None:
    """Stop the run, and compare its curve with that of ranks that read their own data, without Ray or a driver."""
    run.stop()
    result = run.result(timeout=60)
    records = pool.train(make_small_config(None, *WORDS), steps_to=result.steps)[0]
    assert result.outcome == "stopped" and count_steps(run_dir) == result.steps
    assert read_curve(run_dir, result.steps) == [curve_point(metrics) for metrics in get_step_metrics(records)]


def wait_for_steps(run_dir: Path, count: int) -> None:
    """Wait until `count` more steps are committed."""
    before = count_steps(run_dir)
    wait_until(lambda: count_steps(run_dir) >= before + count)


@pytest.mark.timeout(200)
def test_killed_ray_readers_do_not_change_the_losses(
    ray_cluster: None, pool: WarmPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = rt.start(make_small_config(tmp_path, *WORDS, *throttle(2), "data.engine=ray"))
    wait_until(lambda: count_steps(tmp_path) and find_reader_processes())
    wait_for_steps(tmp_path, 30)
    for pid in (killed := find_reader_processes()):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: set(find_reader_processes()) - set(killed))  # Ray Data starts another one
    wait_for_steps(tmp_path, 30)
    stop_and_compare(run, tmp_path, pool)
    assert killed and "lost" not in capfd.readouterr().out
    wait_until(lambda: not find_reader_processes())


@pytest.mark.timeout(200)
def test_full_object_store_does_not_change_the_losses(
    ray_cluster: None, pool: WarmPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
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
        run = rt.start(make_small_config(tmp_path, *WORDS, *throttle(2), "data.engine=ray"))
        wait_until(lambda: count_steps(tmp_path) and find_reader_processes())
        wait_for_steps(tmp_path, 100)
        stop_and_compare(run, tmp_path, pool)
    finally:
        ray.kill(occupant)
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
