"""The request to Ray's autoscaler: what a run wants, when it is sent, and that it is released. With a fake of Ray's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.autoscaler import Bundle, count_wanted_workers
from raytrain_hpc.driver.run_coordinator import CLAIM_TTL_S, RunCoordinator
from raytrain_hpc.elastic.device_allocation import DeviceClaim


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


CLAIM = DeviceClaim("a", "a", 0, since=0.0, minimum=1, requested=3, total=8, free=8)


def test_the_request_is_that_of_all_runs_and_is_released() -> None:
    sent: list[int] = []
    coordinator = RunCoordinator(lambda bundles: sent.append(len(bundles)), in_background=False)
    assert coordinator.tick(time.time()) and sent == []
    coordinator.report(CLAIM)
    coordinator.tick(time.time())
    coordinator.report(replace(CLAIM, requested=5))
    coordinator.report(replace(CLAIM, run_id="b", requested=2))
    coordinator.tick(time.time())
    coordinator.tick(time.time())
    coordinator.leave("a")
    coordinator.tick(time.time())
    assert sent == [3, 7, 2]
    assert coordinator.tick(time.time() + CLAIM_TTL_S + 1.0), "a run has died"
    assert sent == [3, 7, 2, 0]
    assert not coordinator.tick(time.time() + 120.0), "the actor ends when no run has come for a minute"


def test_an_autoscaler_that_does_not_answer_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    answers = [RuntimeError("no answer"), None]

    def send(bundles: Sequence[Bundle]) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    coordinator = RunCoordinator(send, in_background=False)
    coordinator.report(CLAIM)
    assert coordinator.tick(time.time())
    assert "did not reach Ray's autoscaler: no answer" in caplog.text
    assert coordinator.tick(time.time()) and not answers
