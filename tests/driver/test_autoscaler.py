"""The request to Ray's autoscaler: what a run wants, when it is sent, and that it is released. With a fake of Ray's."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.autoscaler import (
    AutoscalerRequest,
    Bundle,
    count_wanted_workers,
    find_resource,
    list_bundles,
)
from tests.driver.cli_process import wait_until


@pytest.mark.parametrize(
    ("words", "target", "wanted"),
    [
        (["cluster.workers=6"], 0, 6),
        (["cluster.workers=6"], 3, 3),
        (["cluster.max_workers=8"], 2, 8),
        (["cluster.max_workers=8", "cluster.min_workers=4"], 0, 8),
        (["cluster.min_workers=4"], 0, 4),
        (["cluster.min_workers=4"], 6, 6),
        ([], 0, 1),
        (["parallel.dp_replicate=3"], 0, 3),
    ],
)
def test_wanted_workers(words: list[str], target: int, wanted: int) -> None:
    assert count_wanted_workers(load_config(None, words), target) == wanted


def test_a_bundle_per_group_that_shares_a_node() -> None:
    config = load_config(None, ["parallel.tp=4", "cluster.workers=12"])
    assert list_bundles(config, "GPU", 9) == [{"GPU": 4.0}] * 3
    assert list_bundles(load_config(None, ["cluster.cpus_per_worker=3"]), "CPU", 2) == [{"CPU": 3.0}] * 2
    assert list_bundles(load_config(None, ["cluster.cpus_per_worker=3"]), "GPU", 2) == [{"GPU": 1.0}] * 2


@pytest.mark.parametrize(("device", "gpus", "resource"), [("auto", 0, "CPU"), ("auto", 8, "GPU"), ("cuda", 0, "GPU")])
def test_resource_of_a_worker(device: str, gpus: int, resource: str) -> None:
    assert find_resource(load_config(None, [f"cluster.device={device}"]), {"CPU": 4.0, "GPU": gpus}) == resource


def test_the_request_follows_the_target_and_is_released() -> None:
    sent: list[Sequence[Bundle]] = []
    request = AutoscalerRequest(load_config(None, ["cluster.workers=2", "cluster.spares=1"]), "GPU", sent.append)
    request.release()
    assert sent == [], "another run's request is not withdrawn"
    request.ask()
    wait_until(lambda: len(sent) == 1, timeout_s=10)
    request.ask(2)
    request.ask(4)
    wait_until(lambda: len(sent) == 2, timeout_s=10)
    request.release()
    request.release()
    assert [len(bundles) for bundles in sent] == [3, 5, 0]


def test_an_autoscaler_that_does_not_answer_is_only_reported(caplog: pytest.LogCaptureFixture) -> None:
    def fail(bundles: Sequence[Bundle]) -> None:
        raise RuntimeError("no answer")

    request = AutoscalerRequest(load_config(None, ["cluster.workers=2"]), "GPU", fail)
    request.ask()
    wait_until(lambda: "did not reach Ray's autoscaler: no answer" in caplog.text, timeout_s=10)
    request.release()


class LateThread(threading.Thread):
    """A thread that begins late, as one does that imports first."""

    def run(self) -> None:
        time.sleep(0.3)
        super().run()


def test_the_end_of_a_run_waits_for_the_request_that_is_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it is sent when Ray is disconnected."""
    monkeypatch.setattr(threading, "Thread", LateThread)
    sent: list[int] = []
    request = AutoscalerRequest(
        load_config(None, ["cluster.workers=3"]), "CPU", lambda bundles: sent.append(len(bundles))
    )
    request.ask()
    request.release()
    assert len(sent) == 2 and sent[-1] == 0
