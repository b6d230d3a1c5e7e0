"""Training on what readers on Ray deliver: the losses of the local engine, bit for bit, whoever dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import raytrain_hpc as rt
from tests.data.test_ledger import readers, until
from tests.driver.lives import count, joined
from tests.pool import small

WORDS = ["train.steps=1200", "train.global_batch=4", "cluster.workers=2", "checkpoint.every=0", "train.micro_batch=2"]


@pytest.fixture(scope="module")
def local(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> list:
    run_dir = tmp_path_factory.mktemp("local")
    rt.train(small(run_dir, *WORDS))
    return joined(run_dir, 1200)


@pytest.mark.timeout(200)
def test_readers_on_ray_give_the_same_losses_and_may_be_killed(
    local: list, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = rt.start(small(tmp_path, *WORDS, "data.engine=ray"))
    killed = []

    def kill() -> None:
        while run.running and not killed:
            for pid in readers():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    run.result(timeout=180)
    killer.join()
    assert joined(tmp_path, 1200) == local
    assert killed and count(tmp_path) == 1200
    assert "lost" not in capfd.readouterr().out
    until(lambda: not readers())


@pytest.mark.timeout(120)
def test_no_cpu_for_readers_is_a_line(ray_cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import ray

    @ray.remote(num_cpus=6)
    class Hog:
        def up(self) -> bool:
            return True

    hog = Hog.remote()
    ray.get(hog.up.remote())
    try:
        words = [*WORDS, "data.engine=ray", "train.steps=1200"]
        rt.train(small(tmp_path, *words))
        assert "no CPU is free for them" in capfd.readouterr().out
    finally:
        ray.kill(hog)
